"""Trains a model's learned scores (`fusion/learned.py`) on the model's own full prefills.

A training example is a few chunks of one prompt and what may follow them. Every chunk token gets a
*share*: its KV is mixed from freshly computed KV, to that share, and stored KV. The scores and a
budget set the shares, and noise pushes most of them close to 0 or 1. The model then predicts what
follows a little worse than a full prefill does. The gradient of that loss (KL) with respect to the
shares trains the scores. All tokens run through the model, so a recomputed token sees its
neighbours as stored or as recomputed, just as it does when a question is answered.

This trains scores that hold for every question. What a token gains by a particular question is
trained on the attention of the question's last row in the full prefill, in the second half of the
layers: the tokens it attends to gain, and the tokens before them in the same chunk, which they
depend on. At last scores and gains are trained together: the shares of a step come from both, for
one question, and the loss is again the KL of what follows that question. Gains that start from
nothing do not learn from this loss; gains that know the attention do.

No correct answers are needed: a full prefill is the teacher, so any model can be trained on any
text.
"""

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from ragkv.engine import Engine
from ragkv.errors import InputError, UnsupportedModelError
from ragkv.fusion.learned import QUESTION_TOKENS, TEXTS, ScoreModel, shape_of, token_features
from ragkv.fusion.sensitivity import MOST_MOVED_LEARNED
from ragkv.model import adapt
from ragkv.model.fingerprint import rounded_digest
from ragkv.types import Chunk
from training.mixed_pass import PreparedExample, predict

RATIOS = (0.03, 0.05, 0.05, 0.06, 0.06, 0.08)  # The budget of a step is drawn from these.
SHARPNESS = 0.5  # The step from a share of 0 to 1 is so wide, in units of a log score.
# Noise of this size is added to log scores before the step, so that shares end up near 0 or 1.
NOISE = 0.5
RATE = 1e-3
WARMUP_STEPS = 40
# Gains get so many steps for each step that trains scores; these do not run the model.
QUESTION_STEPS = 4
TOGETHER_RATE = 3e-4
# A token inherits `INHERITED_SHARE` of the attention to the token behind it in its chunk.
INHERITED_SHARE = 0.7
# Prepared examples are kept up to this size; others are prepared again at each use.
KEPT_BYTES = 2 << 30


_Loss = Callable[[ScoreModel], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Continuation:
    """What may follow an example's chunks: a question and its answer, or the text that
    comes next.
    """

    token_ids: tuple[int, ...]
    known: int  # the first tokens, which are given; the model predicts the others


@dataclass(frozen=True, slots=True, eq=False)
class TrainingExample:
    """The chunks of one prompt, in order, and what may follow them."""

    chunks: tuple[Chunk, ...]
    continuations: tuple[Continuation, ...]


def train(
    engine: Engine,
    examples: Sequence[TrainingExample],
    steps: int,
    seed: int = 0,
    on_step: Callable[[int, int, float], None] | None = None,
) -> ScoreModel:
    """Train scores in `steps` steps of one example each, gains in `QUESTION_STEPS` times as many,
    then both in `steps`.

    `on_step(done, total, loss)` is called after each step; the loss is in nats per token, then per
    question, then per token again.

    The engine must compute in float32 and score behind two texts. Raises `InputError` otherwise,
    and without examples; `UnsupportedModelError` for a model whose RoPE frequencies depend on the
    prompt's length.
    """
    adapter = engine.model.adapter
    if not examples or any(
        len(example.chunks) < 2 or not example.continuations for example in examples
    ):
        raise InputError(
            "Scores are learned from one example or more, each of at least two chunks and a "
            "continuation."
        )
    if any(
        not 0 < one.known < len(one.token_ids)
        for example in examples
        for one in example.continuations
    ):
        raise InputError(
            "A continuation needs a known token or more, and one or more behind them to predict."
        )
    if engine.config.fusion.sensitivity_prefixes != TEXTS or adapter.dtype is not torch.float32:
        raise InputError(
            f"Scores are learned in float32 with fusion.sensitivity_prefixes = {TEXTS}."
        )
    if adapter.rope.depends_on_length:
        raise UnsupportedModelError(
            "Scores cannot be learned where RoPE's frequencies depend on the prompt's length."
        )
    torch.manual_seed(seed)
    model = ScoreModel(*shape_of(adapter), teacher=rounded_digest(adapter.model)).to(adapter.device)
    total = (1 + QUESTION_STEPS + 1) * steps
    done = 0

    def optimize(
        parameters: list[nn.Parameter], count: int, rate: float, loss_of: _Loss, keep_kv: bool
    ) -> None:
        nonlocal done
        trainer.restart(random.Random(seed), keep_kv)
        for loss in _optimized(parameters, count, rate, lambda: loss_of(model)):
            done += 1
            if on_step:
                on_step(done, total, loss)

    trainer = ScoreTrainer(engine, examples)
    parts = (model.about, model.name, model.hear, model.muse, model.ask)
    gains = [weights for part in parts for weights in part.parameters()]
    optimize(
        [*model.worth.parameters(), *model.tell.parameters()], steps, RATE, trainer.score_loss, True
    )
    optimize(gains, QUESTION_STEPS * steps, RATE, trainer.question_loss, False)
    optimize(list(model.parameters()), steps, TOGETHER_RATE, trainer.together_loss, True)
    return ScoreModel.from_bytes(model.cpu().to_bytes())


def _optimized(
    parameters: list[nn.Parameter], steps: int, rate: float, loss_of: Callable[[], torch.Tensor]
) -> Iterator[float]:
    """The loss of each step, after it."""
    optimizer = torch.optim.AdamW(parameters, rate, weight_decay=1e-3)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / WARMUP_STEPS) * max(0.02, 1 - step / steps)
        loss = loss_of()
        optimizer.zero_grad()
        # no gradients for the language model's own weights
        torch.autograd.backward(loss, inputs=parameters)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        yield float(loss.detach())


def shares(log_scores: torch.Tensor, budget: float) -> torch.Tensor:
    """Shares (N,) in (0, 1) that sum to `budget`, larger for larger `log_scores` (N,);
    differentiable, with noise.
    """
    uniform = torch.rand_like(log_scores).clamp(1e-4, 1 - 1e-4)
    noisy = log_scores + NOISE * (uniform.log() - (-uniform).log1p())
    low = noisy.detach().min() - 10
    high = noisy.detach().max() + 10
    for _ in range(40):
        middle = (low + high) / 2
        over = torch.sigmoid((noisy.detach() - middle) / SHARPNESS).sum() > budget
        low, high = (middle, high) if over else (low, middle)
    spread = torch.sigmoid((noisy - low) / SHARPNESS)
    slope = (spread * (1 - spread)).detach().sum() / SHARPNESS
    # One Newton step, for its gradient: a larger share of one token means smaller shares of the
    # others.
    threshold = low + (spread.sum() - budget) / slope
    return torch.sigmoid((noisy - threshold) / SHARPNESS)


def kl(predicted: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """KL(teacher || predicted) of each of A distributions, given as log-probabilities (A, V): nats,
    (A,).
    """
    return functional.kl_div(predicted, teacher, log_target=True, reduction="none").sum(1)


class ScoreTrainer:
    """Goes through the examples again and again, and runs an engine's model so that gradients pass
    through it.
    """

    def __init__(self, engine: Engine, examples: Sequence[TrainingExample] = ()) -> None:
        self._engine = engine
        # without packed weights, which have no gradients
        self.adapter = adapt(engine.model.adapter.model)
        self._examples = list(examples)
        self._cache: dict[TrainingExample, PreparedExample] = {}
        self._keep_kv = True
        self.restart(random.Random(0))

    def restart(self, order: random.Random, keep_kv: bool = True) -> None:
        """Start again in another order. `keep_kv=False` if the next steps run no example through
        the model.
        """
        if keep_kv and not self._keep_kv:
            self._cache.clear()
        elif not keep_kv:
            self._cache = {
                example: prepared.without_kv() for example, prepared in self._cache.items()
            }
        self._order = order
        self._keep_kv = keep_kv
        self._queue: list[TrainingExample] = []
        self._cached_bytes = sum(prepared.nbytes for prepared in self._cache.values())

    def score_loss(self, model: ScoreModel) -> torch.Tensor:
        """KL of the next example's predictions against a full prefill, in nats per token."""
        prepared = self._next()
        log_scores = torch.cat([model(features)[:, 0] for features in prepared.features])
        budget = max(1.0, self._order.choice(RATIOS) * len(log_scores))
        return kl(
            predict(self.adapter, prepared, prepared.fresh(shares(log_scores, budget))),
            prepared.teacher,
        ).mean()

    def question_loss(self, model: ScoreModel) -> torch.Tensor:
        """Cross-entropy of the gains against the attention of the next example's questions, in nats
        per question.
        """
        prepared = self._next()
        topics = torch.cat([model(features)[:, 1:] for features in prepared.features])
        # (M, N)
        gains = torch.stack([model.gains(topics, question) for question in prepared.questions])
        return functional.cross_entropy(gains, prepared.attended)

    def together_loss(self, model: ScoreModel) -> torch.Tensor:
        """KL of the predictions behind one question of the next example, whose gains take part; in
        nats per token.
        """
        prepared = self._next()
        number = self._order.randrange(len(prepared.questions))
        asked = prepared.asked(number)
        found = torch.cat([model(features) for features in prepared.features])
        log_scores = found[:, 0] + model.gains(found[:, 1:], prepared.questions[number])
        budget = max(1.0, self._order.choice(RATIOS) * len(log_scores))
        return kl(
            predict(self.adapter, asked, asked.fresh(shares(log_scores, budget))), asked.teacher
        ).mean()

    def _next(self) -> PreparedExample:
        if not self._queue:
            self._queue = self._order.sample(self._examples, len(self._examples))
        example = self._queue.pop()
        prepared = self._cache.get(example)
        if prepared is None:
            # The lock also guards the scorer, which requests and the background encoder use too.
            with self._engine.scheduler.turn():
                prepared = self.prepare(example)
            if not self._keep_kv:
                prepared = prepared.without_kv()
        if self._cached_bytes < KEPT_BYTES and example not in self._cache:
            self._cache[example], self._cached_bytes = (
                prepared,
                self._cached_bytes + prepared.nbytes,
            )
        return prepared

    @torch.no_grad()
    def prepare(self, example: TrainingExample) -> PreparedExample:
        """The tensors of an example, with what a full prefill predicts."""
        encoder = self._engine.entries.encoder
        adapter = self.adapter
        tensor = partial(torch.tensor, device=adapter.device)
        ids = list(self._engine.intake.runs.before_documents)
        reused: list[int] = []
        features = []
        stored = []
        encoder.make_scores()
        chunks = [chunk.token_ids for chunk in example.chunks]
        encoder.register(chunks)
        own = [entry.kv for entry in encoder.chunks(chunks)]
        assert encoder.scorer is not None, "`train` has checked that there is one"
        behind = encoder.scorer.kv_behind_texts(chunks, own, MOST_MOVED_LEARNED)
        for number, (chunk, entry_kv, behind_texts) in enumerate(
            zip(example.chunks, own, behind, strict=True)
        ):
            if number:  # the first chunk, right behind the prefix, is exact
                reused += range(len(ids), len(ids) + len(chunk))
                kv = entry_kv.to(adapter.device)
                features.append(token_features(kv, behind_texts))
                stored.append(kv)
            ids += chunk.token_ids + self._engine.intake.separator
        branch = [0] * len(ids)
        positions = list(range(len(ids)))
        end = len(ids)
        predicting = list[int]()
        asking = list[int]()
        questions = []
        for number, continuation in enumerate(example.continuations, 1):
            count = len(continuation.token_ids)
            known = continuation.known
            predicting += range(len(ids) + known - 1, len(ids) + count - 1)
            questions.append(
                adapter.embed(tensor(continuation.token_ids[:known][-QUESTION_TOKENS:]))[0]
            )
            asking.append(len(ids) + known - 1)
            ids += continuation.token_ids
            branch += [number] * count
            positions += range(end, end + count)
        prepared = PreparedExample(
            token_ids=tensor(ids),
            positions=tensor(positions),
            branch=tensor(branch),
            reused=tensor(reused),
            predicting=tensor(predicting),
            stored=torch.cat(stored, dim=3),
            features=tuple(features),
            questions=tuple(questions),
        )
        received = torch.zeros((len(asking), len(ids)), device=adapter.device)
        everything_fresh = prepared.fresh(torch.ones(len(reused), device=adapter.device))
        teacher = predict(adapter, prepared, everything_fresh, (tensor(asking), received))
        chunk_of = torch.tensor(
            [number for number, tokens in enumerate(features) for _ in range(len(tokens))]
        )
        rows = received[:, prepared.reused].cpu()
        attended = (
            torch.stack([inherited_attention(row, chunk_of) for row in rows])
            .clamp_min(1e-9)
            .to(adapter.device)
        )
        return dataclasses.replace(
            prepared, teacher=teacher, attended=attended / attended.sum(1).mean()
        )


def inherited_attention(attention: torch.Tensor, chunk_of: torch.Tensor) -> torch.Tensor:
    """The larger of each token's own `attention` (N,) and the share it inherits from later tokens
    of its chunk.

    An attended token depends on earlier tokens, such as the pronoun of its sentence.
    """
    found = attention.tolist()
    chunks = chunk_of.tolist()
    inherited = 0.0
    for place in range(len(found) - 1, -1, -1):
        if place + 1 < len(chunks) and chunks[place] != chunks[place + 1]:
            inherited = 0.0
        inherited = found[place] = max(inherited * INHERITED_SHARE, found[place])
    return torch.tensor(found)
