"""Teaches a model's learned scores (`fusion/learned.py`) by the model's own full prefills.

A lesson is chunks that stand in one prompt and what may follow them. Of every token of theirs a *share* of freshly
computed KV takes the place of the stored: the scores say how large, a budget how large on the whole, and noise makes
most of them nearly 0 or 1. What follows is then foretold a little worse than by a full prefill, and the gradient of
that (KL) with respect to the shares teaches the scores. The rows of all tokens are driven, so a token computed again
sees its neighbours as stored, or as computed again, just as it does at question time.

That teaches scores, whatever is asked. What they gain by a question is taught by what the last of the question's
rows attends to in the full prefill, in the later half of the layers: a token that is attended to, and those before it
in its chunk, which it draws on.

Nothing is known of right answers: a full prefill is the teacher, so any model can be taught on any text.
"""

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional
from transformers import Cache

from ragkv.engine import Engine
from ragkv.errors import InputError, UnsupportedModelError
from ragkv.fusion.learned import QUESTION_TOKENS, TEXTS, ScoreModel, shape_of, token_features
from ragkv.fusion.selectors.sensitivity import inherited_attention
from ragkv.model import Adapter, Rows, adapt
from ragkv.types import Chunk

RATIOS = (0.03, 0.05, 0.05, 0.06, 0.06, 0.08)  # a lesson's budget is drawn among these
SHARPNESS = 0.5  # of the step from a share of 0 to 1, in units of a log score
NOISE = 0.5  # added to log scores before the step, so that shares end up near 0 or 1
RATE, WARMUP_STEPS = 1e-3, 40
ASKING = 4  # steps that teach gains, for each that teaches scores; they drive no model
FOLLOWING_TOKENS = 32  # of a chunk, as what follows those before it
KNOWN_TOKENS = 12  # of them at most are known, like a question
CHUNKS = 6  # of a prompt made of documents
KEPT_BYTES = 2 << 30  # of lessons prepared; others are prepared again each time


@dataclass(frozen=True, slots=True)
class Tail:
    """What may follow a lesson's chunks: a question and its answer, or the text that comes next."""

    token_ids: tuple[int, ...]
    known: int  # its first tokens, which are given; the others are foretold


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """Chunks that stand in one prompt, in order, and what may follow."""

    chunks: tuple[Chunk, ...]
    tails: tuple[Tail, ...]


def lessons_of(chunks: Sequence[Chunk]) -> list[Lesson]:
    """Lessons out of the chunks of documents, in order: the beginning of one is what follows those before it."""
    size = min(CHUNKS, len(chunks) - 1)
    if size < 2:
        raise InputError(f"Scores are learned from at least 3 chunks that follow each other, not {len(chunks)}.")
    made = []
    for start in range(len(chunks) - size):
        following = chunks[start + size].token_ids[:FOLLOWING_TOKENS]
        known = min(1 + start % KNOWN_TOKENS, len(following) - 1)
        if known:
            made.append(Lesson(tuple(chunks[start : start + size]), (Tail(following, known),)))
    return made


def learn(
    engine: Engine,
    lessons: Sequence[Lesson],
    steps: int,
    seed: int = 0,
    on_step: Callable[[int, int, float], None] | None = None,
    start: ScoreModel | None = None,
) -> ScoreModel:
    """Scores learned in `steps` steps, a lesson each, then in `ASKING` times as many what they gain by a question.

    `on_step(done, of, loss)` is called after each; the loss is in nats a token, then a question. `start` stays as
    it is, its scores are kept.

    The engine computes in float32 and scores behind two texts. Raises `InputError` where it does not, or where there
    are no lessons, and `UnsupportedModelError` for a model whose frequencies depend on the prompt's length.
    """
    if not lessons or any(len(lesson.chunks) < 2 or not lesson.tails for lesson in lessons):
        raise InputError("Scores are learned from lessons of at least two chunks and a tail, and there must be one.")
    if engine.config.fusion.sensitivity_prefixes != TEXTS or engine.parts.adapter.dtype is not torch.float32:
        raise InputError(f"Scores are learned in float32 with fusion.sensitivity_prefixes = {TEXTS}.")
    if engine.parts.adapter.rope.depends_on_length:
        raise UnsupportedModelError("Scores cannot be learned where RoPE's frequencies depend on the prompt's length.")
    torch.manual_seed(seed)
    adapter = engine.parts.adapter
    model = ScoreModel(*shape_of(adapter))
    if start is not None:
        model.load_state_dict(start.state_dict())
    model.set_teacher(adapter.model)
    model.to(adapter.device)
    asking = ASKING * steps
    scoring = 0 if start is not None else steps

    def follow(done: int, loss: float) -> None:
        if on_step:
            on_step(done, scoring + asking, loss)

    room = _Classroom(engine, lessons)
    if scoring:
        room.begin(random.Random(seed))
        _taught(model.score_parameters(), scoring, lambda: room.scored(model), follow)
    room.begin(random.Random(seed), driven=False)
    _taught(
        model.question_parameters(), asking, lambda: room.asked(model), lambda done, loss: follow(scoring + done, loss)
    )
    return ScoreModel.from_bytes(model.cpu().to_bytes())


def _taught(
    numbers: list[nn.Parameter], steps: int, lesson: Callable[[], torch.Tensor], follow: Callable[[int, float], None]
) -> None:
    """Change `numbers` so that what `lesson` gives gets less."""
    optimizer = torch.optim.AdamW(numbers, RATE, weight_decay=1e-3)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARMUP_STEPS) * max(0.02, 1 - step / steps)
        loss = lesson()
        optimizer.zero_grad()
        torch.autograd.backward(loss, inputs=numbers)  # no others get gradients, the model's own weights least of all
        nn.utils.clip_grad_norm_(numbers, 1.0)
        optimizer.step()
        follow(step + 1, float(loss.detach()))


def shares(log_scores: torch.Tensor, budget: float) -> torch.Tensor:
    """Shares (N,) in (0, 1) that sum to `budget`, larger for larger `log_scores` (N,); differentiable, noisy."""
    uniform = torch.rand_like(log_scores).clamp(1e-4, 1 - 1e-4)
    noisy = log_scores + NOISE * (uniform.log() - (-uniform).log1p())
    low, high = noisy.detach().min() - 10, noisy.detach().max() + 10
    for _ in range(40):
        middle = (low + high) / 2
        over = torch.sigmoid((noisy.detach() - middle) / SHARPNESS).sum() > budget
        low, high = (middle, high) if over else (low, middle)
    spread = torch.sigmoid((noisy - low) / SHARPNESS)
    slope = (spread * (1 - spread)).detach().sum() / SHARPNESS
    threshold = low + (spread.sum() - budget) / slope  # one step of Newton, for its gradient: more here is less there
    return torch.sigmoid((noisy - threshold) / SHARPNESS)


def kl(said: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """KL(wanted || said) of each of A distributions, given as log-probabilities (A, V): nats, (A,)."""
    return functional.kl_div(said, wanted, log_target=True, reduction="none").sum(1)


class _Classroom:
    """One engine's model, driven so that gradients come through, and the lessons, again and again."""

    def __init__(self, engine: Engine, lessons: Sequence[Lesson] = ()) -> None:
        self._engine = engine
        self._adapter = adapt(engine.parts.adapter.model)  # without packed weights, through which no gradient comes
        self._lessons = list(lessons)
        self._seen: dict[Lesson, _Prepared] = {}
        self.begin(random.Random(0))

    def begin(self, order: random.Random, driven: bool = True) -> None:
        """From the start, in another order; lessons that are not `driven` through the model need not keep their KV."""
        self._order, self._driven = order, driven
        self._waiting: list[Lesson] = []
        if not driven:
            self._seen = {lesson: at.without_kv() for lesson, at in self._seen.items()}
        self._kept_bytes = sum(at.nbytes for at in self._seen.values())

    def scored(self, model: ScoreModel) -> torch.Tensor:
        """How much worse the next lesson's tails are foretold by scores alone than by a full prefill, nats a token."""
        at = self._next()
        log_scores = torch.cat([model(one)[:, 0] for one in at.studied])
        budget = max(1.0, self._order.choice(RATIOS) * len(log_scores))
        said = self._foretold(at, at.fresh(shares(log_scores, budget)))
        return kl(said, at.wanted).mean()

    def asked(self, model: ScoreModel) -> torch.Tensor:
        """How far gains are from what the next lesson's questions attend to, cross-entropy, nats a question."""
        at = self._next()
        topics = torch.cat([model(one)[:, 1:] for one in at.studied])
        gains = torch.stack([model.gains(topics, asked) for asked in at.asked])  # (M, N)
        return functional.cross_entropy(gains, at.attended)

    def _next(self) -> "_Prepared":
        if not self._waiting:
            self._waiting = self._order.sample(self._lessons, len(self._lessons))
        lesson = self._waiting.pop()
        at = self._seen.get(lesson)
        if at is None:
            with (
                self._engine.parts.activity.acquire_compute_lock()
            ):  # requests and the background encoder use the same scorer
                at = self._prepared(lesson)
            if not self._driven:
                at = at.without_kv()
        if self._kept_bytes < KEPT_BYTES and lesson not in self._seen:
            self._seen[lesson], self._kept_bytes = at, self._kept_bytes + at.nbytes
        return at

    @torch.no_grad()
    def _prepared(self, lesson: Lesson) -> "_Prepared":
        engine, adapter = self._engine, self._adapter
        encoder, device = engine.parts.encoder, adapter.device
        ids = list(engine.parts.runs.before_documents)
        reused: list[int] = []
        studied, kept = [], []
        encoder.register([chunk.token_ids for chunk in lesson.chunks])
        for number, chunk in enumerate(lesson.chunks):
            entry, others = encoder.training_sample(chunk.token_ids)
            if number:  # the first, right behind the prefix, is exact
                reused += range(len(ids), len(ids) + len(chunk))
                studied.append(token_features(entry.kv.to(device), others))
                kept.append(entry.kv.to(device))
            ids += chunk.token_ids
        branch, places = [0] * len(ids), list(range(len(ids)))
        foretelling: list[int] = []
        asked, asking = [], list[int]()
        end = len(ids)
        for number, tail in enumerate(lesson.tails, 1):
            foretelling += range(len(ids) + tail.known - 1, len(ids) + len(tail.token_ids) - 1)
            known = torch.tensor(tail.token_ids[: tail.known][-QUESTION_TOKENS:], device=device)
            asked.append(adapter.embed(known)[0])
            asking.append(len(ids) + tail.known - 1)
            ids += tail.token_ids
            branch += [number] * len(tail.token_ids)
            places += range(end, end + len(tail.token_ids))
        prepared = _Prepared(
            torch.tensor(ids, device=device),
            torch.tensor(places, device=device),
            torch.tensor(branch, device=device),
            torch.tensor(reused, device=device),
            torch.tensor(foretelling, device=device),
            torch.cat(kept, dim=3),
            tuple(studied),
            tuple(asked),
        )
        watched = torch.zeros((len(asking), len(ids)), device=device)
        every = torch.ones(len(reused), device=device)
        wanted = self._foretold(prepared, prepared.fresh(every), (torch.tensor(asking, device=device), watched))
        heard = watched[:, prepared.reused].cpu()
        starts = torch.tensor([number for number, one in enumerate(studied) for _ in range(len(one))])
        attended = torch.stack([inherited_attention(one, starts) for one in heard]).clamp_min(1e-9).to(device)
        return dataclasses.replace(prepared, wanted=wanted, attended=attended / attended.sum(1).mean())

    def _foretold(
        self, at: "_Prepared", fresh: torch.Tensor, watch: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Log-probabilities (A, V) behind the tokens that foretell, where KV is fresh to the shares `fresh` (S,).

        `watch`: places (M,), and what they attend to in the later half of the layers is added up there, (M, S).
        """
        adapter = self._adapter
        rows = Rows(at.positions, None)
        tables = adapter.rope.tables(int(at.positions.max()) + 1)
        hidden = adapter.embed(at.token_ids)
        windows = [adapter.window(layer) for layer in range(adapter.layer_count)]
        allowed = {window: at.allowed(window) for window in set(windows)}
        for layer, window in enumerate(windows):
            turn = tables.rows(adapter.rope_kind(layer), at.positions)
            watched = watch if layer >= adapter.layer_count // 2 else None
            mask = _BranchMask(adapter, layer, turn, allowed[window], watched)
            hidden = adapter.call_layer(layer, hidden, rows, mask, _MixingCache(mask, at, fresh))
        return adapter.logits(hidden[:, at.foretelling]).log_softmax(-1)


@dataclass(frozen=True, eq=False)
class _Prepared:
    """A lesson as one row of S tokens: prefix, chunks, then a branch a tail, each as if it were the only one."""

    token_ids: torch.Tensor  # (S,)
    positions: torch.Tensor  # (S,)
    branch: torch.Tensor  # (S,), 0 for what all tails see
    reused: torch.Tensor  # (N,) places of the tokens that stored KV could stand in for
    foretelling: torch.Tensor  # (A,) places behind which a tail's token comes
    stored: torch.Tensor  # (L, 2, G, N, D)
    studied: tuple[torch.Tensor, ...]  # of each chunk that `reused` is of
    asked: tuple[torch.Tensor, ...]  # of each tail, the embeddings (Q, E) of what is known of it
    wanted: torch.Tensor = field(
        default_factory=lambda: torch.empty(0)
    )  # (A, V) log-probabilities under a full prefill
    attended: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # (M, N): what each question attends to

    @property
    def nbytes(self) -> int:
        """Bytes of what is large."""
        return sum(one.nbytes for one in (self.stored, self.wanted, self.attended, *self.studied))

    def without_kv(self) -> "_Prepared":
        """What teaches topics alone."""
        return dataclasses.replace(self, stored=torch.empty(0), wanted=torch.empty(0))

    def fresh(self, shares: torch.Tensor) -> torch.Tensor:
        """The shares (N,) of what could be reused, among those of all places, (S,): the others are computed."""
        every = torch.ones(len(self.token_ids), device=self.token_ids.device)
        return every.index_put((self.reused,), shares)

    def allowed(self, window: int | None) -> torch.Tensor:
        """Which place may attend to which, (S, S)."""
        order = torch.arange(len(self.branch), device=self.branch.device)
        may = order[:, None] >= order[None, :]
        may &= (self.branch[:, None] == self.branch[None, :]) | (self.branch[None, :] == 0)
        if window is not None:
            may &= self.positions[:, None] - self.positions[None, :] < window
        return may


@dataclass(frozen=True, eq=False)
class _BranchMask:
    """Attention of a lesson's rows, differentiable."""

    adapter: Adapter
    layer: int
    turn: tuple[torch.Tensor, torch.Tensor]  # cos and sin of the rows
    allowed: torch.Tensor  # (S, S)
    watch: tuple[torch.Tensor, torch.Tensor] | None = (
        None  # places (M,), and where what they attend to is added, (M, S)
    )

    def rotate(self, raw: torch.Tensor) -> torch.Tensor:
        """(1, heads, S, D) before RoPE -> the same, turned."""
        return self.adapter.rotate_in_float32(self.layer, raw, *self.turn)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, softcap: float | None
    ) -> torch.Tensor:
        """See `model.attention.Mask`."""
        kv_heads, (_, heads, count, head_dim) = key.shape[1], query.shape
        q_rot = self.rotate(query).reshape(kv_heads, heads // kv_heads * count, head_dim)
        scores = (torch.bmm(q_rot, key[0].transpose(1, 2)) * scaling).view(kv_heads, -1, count, count)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        weights = scores.masked_fill(~self.allowed, float("-inf")).softmax(-1)
        if self.watch is not None:
            places, attended = self.watch
            attended += weights[:, :, places].mean(dim=(0, 1))
        return torch.bmm(weights.view(kv_heads, -1, count), value[0]).view(1, heads, count, head_dim)


class _MixingCache(Cache):
    """Gives a layer its fresh keys and values, and the stored ones to the shares that are not."""

    def __init__(self, mask: _BranchMask, at: _Prepared, fresh: torch.Tensor) -> None:
        super().__init__(layers=[])
        self._mask, self._at, self._fresh = mask, at, fresh

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Raw keys and values (1, G, S, D) -> rotated keys and values, mixed."""
        places, share = self._at.reused, self._fresh[self._at.reused, None]
        stored = self._at.stored[layer_idx]  # (2, G, N, D)
        mixed = [
            made.index_copy(2, places, (kept + share * (made[0][:, places] - kept))[None])
            for made, kept in zip((key_states, value_states), stored, strict=True)
        ]
        return self._mask.rotate(mixed[0]), mixed[1]
