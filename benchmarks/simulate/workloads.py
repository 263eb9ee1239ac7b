"""Generated loads: the T-LRU paper's birth-death model of conversations, and a ShareGPT-like load
for CachedAttention.

Simulated, not measured: lengths are drawn from the stated distributions, with a fixed seed.
"""

import random
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from .trace import Trace, TraceBuilder


@dataclass(frozen=True)
class BirthDeath:
    """The paper's model: conversations are born, have turns and die, all at constant rates.

    Q and responses are log-normal. The paper gives no rates; these make four turns a conversation,
    and its mean prompt of 200 tokens (WildChat).
    """

    births_per_s: float = 0.5  # lambda_conv
    turns_per_s: float = 1 / 60  # lambda, of a living conversation
    deaths_per_s: float = 1 / 180  # mu
    prompt_tokens: float = 200.0  # mean of Q
    response_tokens: float = 300.0  # mean of A
    spread: float = 1.0  # sigma of both logarithms
    requests: int = 12_000
    seed: int = 0

    def trace(self, block_tokens: int) -> Trace:
        """The first `requests` turns. A conversation is born with its first turn."""
        draw = random.Random(self.seed)
        builder = TraceBuilder(block_tokens)
        stored = dict[int, int]()
        events: list[tuple[float, int]] = [(0.0, 0)]
        numbers = count(1)
        for _ in range(self.requests):
            at, number = heappop(events)
            if number not in stored:
                heappush(events, (at + draw.expovariate(self.births_per_s), next(numbers)))
            history = stored.get(number, 0)
            prompt = history + _length(draw, self.prompt_tokens, self.spread)
            response = _length(draw, self.response_tokens, self.spread)
            builder.add(at, f"b{number}", prompt, history, response)
            stored[number] = prompt + response
            gap = draw.expovariate(self.turns_per_s + self.deaths_per_s)
            if draw.random() < self.turns_per_s / (self.turns_per_s + self.deaths_per_s):
                heappush(events, (at + gap, number))
        return builder.trace("birth-death", f"simulated: {self}")


@dataclass(frozen=True)
class GeneratedSession:
    """A ShareGPT-like session: its arrival; of each turn new prompt tokens, response tokens and
    thinking time.
    """

    at: float
    turns: tuple[tuple[int, int, float], ...]


@dataclass(frozen=True)
class ShareGPTLike:
    """Sessions as in CachedAttention sections 2.3 and 4.1: Poisson arrivals, 5.75 turns on average,
    73 % of sessions with more than one, 30 % longer than 4K tokens.

    Turn counts are 1 with chance .27, else geometric; prompts and responses log-normal with means
    that give those 30 %; the user thinks an exponential time after each answer.
    """

    sessions: int = 2_000
    arrivals_per_s: float = 1.0
    mean_turns: float = 5.75
    prompt_tokens: float = 200.0
    response_tokens: float = 430.0
    think_s: float = 60.0
    seed: int = 0

    def draw(self) -> list[GeneratedSession]:
        """The sessions, in order of arrival."""
        draw = random.Random(self.seed)
        at = 0.0
        sessions = []
        # mean of turns beyond the second, of those that have any
        more = (self.mean_turns - 0.27) / 0.73 - 2
        for _ in range(self.sessions):
            at += draw.expovariate(self.arrivals_per_s)
            turns = 1 if draw.random() < 0.27 else 2
            while turns > 1 and draw.random() < more / (1 + more):
                turns += 1
            lengths = tuple(
                (
                    _length(draw, self.prompt_tokens, 1.5),
                    _length(draw, self.response_tokens, 0.8),
                    draw.expovariate(1 / self.think_s),
                )
                for _ in range(turns)
            )
            sessions.append(GeneratedSession(at, lengths))
        return sessions

    def trace(self, block_tokens: int) -> Trace:
        """Every turn at its session's arrival plus the thinking times before it: service takes no
        time here.
        """
        requests = []
        for number, session in enumerate(self.draw()):
            at = session.at
            history = 0
            for new, response, think in session.turns:
                requests.append((at, number, history + new, history, response))
                history += new + response
                at += think
        builder = TraceBuilder(block_tokens)
        for at, number, prompt, history, response in sorted(requests):
            builder.add(at, f"s{number}", prompt, history, response)
        return builder.trace("ShareGPT-like", f"simulated: {self}")


def _length(draw: random.Random, mean: float, spread: float) -> int:
    """A log-normal number of tokens with this mean, at least 1."""
    return max(1, round(mean * draw.lognormvariate(-spread * spread / 2, spread)))
