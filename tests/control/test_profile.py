"""Profiles: saving, loading, and refusal for another model or machine."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from ragkv.control.profile import (
    FILE_NAME,
    MOST_TOKENS,
    LengthFit,
    Profile,
    RecomputeFit,
    TierSpeed,
    TimedPoint,
    load,
    save,
)
from ragkv.errors import ProfileError

from .profiles import SUBJECT, profile

MEASURED = profile(
    prefill=LengthFit(0.1, 0.2, 1e-9),
    recompute=RecomputeFit(0.5, 0.0, 0.25, 0.0),
    tiers={
        "memory": TierSpeed(1e-6, 0.0),
        "disk": TierSpeed(1e-4, 1e-9, (TimedPoint(4096, 0.01),)),
    },
    copy_bytes_per_s=1e10,
)


@pytest.mark.parametrize(
    ("fit", "target_s", "tokens"),
    [
        (LengthFit(1.0, 0.01, 0.0), 3.0, 200),
        (LengthFit(1.0, 0.01, 0.0), 1.0, 0),
        (LengthFit(1.0, 0.01, 1e-4), 4.0, 130),  # 1 + 1.3 + 1.69
        (LengthFit(1.0, 0.0, 1e-4), 5.0, 200),
        (LengthFit(1.0, 0.0, 0.0), 5.0, MOST_TOKENS),
    ],
)
def test_the_tokens_within_a_target_are_the_most_whose_prefill_takes_no_longer(
    fit: LengthFit, target_s: float, tokens: int
) -> None:
    assert profile(prefill=fit).tokens_within(target_s) == tokens


def test_saved_profiles_of_two_subjects_are_both_found(tmp_path: Path) -> None:
    other = profile(subject=dataclasses.replace(SUBJECT, threads=8))
    save(MEASURED, tmp_path)
    save(other, tmp_path)
    assert load(tmp_path, SUBJECT) == MEASURED
    assert load(tmp_path, other.subject) == other
    save(profile(), tmp_path)
    assert load(tmp_path, SUBJECT) == profile()


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (dict(weights="0123456789abcdef" * 2), "weights is 'wwww"),
        (dict(dtype="float32"), "dtype is 'bfloat16', not 'float32'"),
        (dict(codec="int8"), "codec is 'raw', not 'int8'"),
        (dict(machine="lap"), "machine is 'desk', not 'lap'"),
        (dict(cpu="Abacus 3000"), "cpu is 'Abacus 2000', not 'Abacus 3000'"),
        (dict(threads=3), "threads is 2, not 3"),
        (dict(device="H200"), "device is 'cpu', not 'H200'"),
        (dict(rope="other", threads=3), "rope is 'rope', not 'other'; threads is 2, not 3"),
    ],
    ids=str,
)
def test_a_profile_of_another_model_or_machine_is_refused_with_the_differences(
    tmp_path: Path, other: dict[str, Any], says: str
) -> None:
    save(profile(), tmp_path)
    save(
        profile(
            subject=dataclasses.replace(SUBJECT, machine="far", cpu="else", threads=99, device="x")
        ),
        tmp_path,
    )
    wanted = dataclasses.replace(SUBJECT, **other)
    with pytest.raises(ProfileError, match=re.escape(says)):
        load(tmp_path, wanted)
    with pytest.raises(ProfileError, match="another model or machine"):
        profile().check(wanted)


def test_a_profile_saved_under_another_key_is_refused(tmp_path: Path) -> None:
    save(profile(), tmp_path)
    path = tmp_path / FILE_NAME
    filed = json.loads(path.read_text())
    filed[SUBJECT.key]["subject"]["threads"] = 64
    path.write_text(json.dumps(filed))
    with pytest.raises(ProfileError, match="threads is 64, not 2"):
        load(tmp_path, SUBJECT)


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a": 1}', "7"])
def test_an_unreadable_profile_file_is_refused_and_replaced_by_the_next_save(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(ProfileError):
        load(tmp_path, SUBJECT)
    if text != '{"a": 1}':  # this one is a JSON object, so it stays
        save(profile(), tmp_path)
        assert load(tmp_path, SUBJECT) == profile()


@pytest.mark.parametrize(
    "wrong",
    [
        dict(start_s=-1.0),
        dict(place_token_layer_s=math.nan),
        dict(recompute=RecomputeFit(0.0, 0.0, -1e-9, 0.0)),
        dict(tiers={"disk": TierSpeed(0.0, math.inf)}),
        dict(layers=0),
        dict(kv_bytes_per_token=0),
        dict(copy_bytes_per_s=0.0),
    ],
    ids=str,
)
def test_numbers_that_cannot_be_measured_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ProfileError):
        profile(**wrong)


def test_a_profile_with_a_missing_or_unknown_field_is_refused() -> None:
    values = json.loads(json.dumps(dataclasses.asdict(profile())))
    with pytest.raises(ProfileError):
        Profile.from_dict({name: value for name, value in values.items() if name != "layers"})
    with pytest.raises(ProfileError, match="speed"):
        Profile.from_dict({**values, "speed": 1})
    with pytest.raises(ProfileError):
        Profile.from_dict({**values, "layers": "three"})
