"""By layer: where two sides' hidden states part, how each layer passes a difference on, and what of it reaches d.

Both sides run through the decoder layer by layer on the same tokens, the learner's function of a layer being F and the
rollout's G (other kernels, formats or weights). With x the learner's residual stream before a layer, y the rollout's,

    G(y) - F(x)  =  [F(y) - F(x)]  +  [G(y) - F(y)]
    difference      passed on          new

exactly: what the learner's own layer makes of the difference that came in, and what the other way of computing adds
there. All three are given in root mean square over the stream's own, at the positions that predict a compared token.
The passed-on part over the difference that came in, both relative, is the layer's amplification.

What a layer's difference does to the log-probs is another matter: most of a stream's error is in directions that no
logit reads. So the layers are also exchanged one by one: the first n computed as the rollout does, the others as the
learner, for every n. What exchanging one more changes adds up to d, and the layer's share of sum d^2 is
sum(change d) / sum(d^2). These shares add up to 1. It takes L / 2 forwards of L layers, so the first ``SEQUENCES``.

Legend: B sequences, T positions, E features, N compared tokens, L layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mantissa.base.errors import MantissaError
from mantissa.doctor.sides import AnyModel, Array, Batch, Scores, Side, attention
from mantissa.model.decoder import Decoder, Layer
from mantissa.runs.plots import BLUE, GREEN, GREY, ORANGE, Line, Plot, chart

SEQUENCES = 8  # whose layers are exchanged one by one
_WORST = 8
_LEAST = 1e-9  # a relative difference that is none
_Stream = tuple[Tensor, Tensor | None]  # the residual stream, and what has yet to be added to it


@dataclass(frozen=True)
class LayerRow:
    """One place. ``difference``, ``passed``, ``new``: relative root mean squares. ``share``: of sum d^2.

    ``amplification``: passed on / what came in; None where nothing did. At ``log-probs`` the three are in nats.
    """

    name: str
    difference: float
    passed: float
    new: float
    amplification: float | None
    share: float


@dataclass(frozen=True)
class WorstToken:
    """A compared token with a large d. ``layer``: the place at which its relative difference grows by most."""

    sequence: int
    position: int
    token: int
    learner: float
    rollout: float
    layer: str


@dataclass(frozen=True)
class ByLayer:
    """``rows``: the embedding, every layer, the log-probs. ``worst``: largest abs(d) first."""

    rows: tuple[LayerRow, ...]
    worst: tuple[WorstToken, ...]
    tokens: int


def by_layer(scores: Scores, learner: Side, rollout: Side, tick: Callable[[str], None] = lambda line: None) -> ByLayer:
    """Follow both sides through the layers. d is that of the two sides as they are given, not a dump's."""
    if (learner.temperature, learner.top_k, learner.top_p) != (rollout.temperature, rollout.top_k, rollout.top_p):
        raise MantissaError("by layer: the two sides differ in temperature or support, which is no layer's; equal them")
    with torch.no_grad():
        return _Follower(scores, learner, rollout, tick).run()


class _Follower:
    def __init__(self, scores: Scores, learner: Side, rollout: Side, tick: Callable[[str], None]) -> None:
        self.scores, self.tick = scores, tick
        kind = _OfTransformers if isinstance(scores.model, AnyModel) else _OfDecoder
        self.model = kind(scores, (learner, rollout))
        self.names = ["embedding", *(f"layer {n}" for n in range(scores.model.config.num_hidden_layers)), "log-probs"]

    def run(self) -> ByLayer:
        count = len(self.scores.d)
        squares = np.zeros((4, len(self.names) - 1))  # of the stream, the difference, the passed on, the new
        relative_NL = np.zeros((count, len(self.names) - 1))
        logp = np.zeros((3, count))  # the learner's, the rollout's, and the learner's head on the rollout's stream
        for batch in self.scores.batches():
            self._follow(batch, squares, relative_NL, logp)
        d = logp[0] - logp[1]
        sizes, differences, passed, new = np.sqrt(squares)
        relative = np.divide(
            np.stack([differences, passed, new]), sizes, where=sizes > 0, out=np.zeros((3, len(sizes)))
        )
        shares = self._shares()
        rows = []
        for n, name in enumerate(self.names[:-1]):
            came = relative[0, n - 1] if n else 0.0
            amplification = float(relative[1, n] / came) if came > 0 else None
            difference, passed_on, added = relative[:, n].tolist()
            rows.append(LayerRow(name, difference, passed_on, added, amplification, shares[n]))
        at_end = (_rms(d), _rms(logp[0] - logp[2]), _rms(logp[2] - logp[1]))
        rows.append(LayerRow(self.names[-1], *at_end, None, shares[-1]))
        return ByLayer(tuple(rows), self._worst(d, logp, relative_NL), count)

    # layer by layer

    def _follow(self, batch: Batch, squares: Array, relative_NL: Array, logp: Array) -> None:
        steps = zip(self.model.steps(batch, 0), self.model.steps(batch, 1), strict=True)
        streams: list[_Stream | None] = [None, None]
        for n, (f, g) in enumerate(steps):
            x, y = f(streams[0]), g(streams[1])
            between = x if streams[1] is None else f(streams[1])
            streams = [x, y]
            own, other, passed = (batch.before(_whole(each)).double() for each in (x, y, between))
            parts = (own, other - own, passed - own, other - passed)
            squares[:, n] += [float(part.square().sum()) for part in parts]
            sizes = [part.square().sum(-1).sqrt() for part in parts[:2]]
            relative_NL[batch.places, n] = (sizes[1] / sizes[0].clamp(min=1e-30)).cpu().numpy()
        mine, theirs = streams
        assert mine is not None
        assert theirs is not None
        for n, (side, stream) in enumerate(((0, mine), (1, theirs), (0, theirs))):
            logp[n, batch.places] = self.model.head(batch, side, stream)

    # exchanging layers one by one

    def _shares(self) -> list[float]:
        """Of the embedding, each layer and the head: sum(change d) / sum(d^2), 0 where d is 0."""
        changes = [0.0] * len(self.names)
        whole = 0.0
        for batch in self._some():
            rollout = _done(self.model.steps(batch, 1))  # the first n as the rollout: its streams, kept
            at = [self.model.head(batch, 0, self._rest(batch, None, 0))]
            for n in range(len(rollout)):
                self.tick(f"exchanging {self.names[n]}")
                at.append(self.model.head(batch, 0, self._rest(batch, rollout[n], n + 1)))
            at.append(self.model.head(batch, 1, rollout[-1]))
            d = at[0] - at[-1]
            whole += float(np.square(d).sum())
            changes = [
                total + float(((before - after) * d).sum())
                for total, before, after in zip(changes, at, at[1:], strict=False)
            ]
        return [change / whole if whole else 0.0 for change in changes]

    def _rest(self, batch: Batch, stream: _Stream | None, first: int) -> _Stream:
        """The learner's steps from ``first`` on."""
        for n, step in enumerate(self.model.steps(batch, 0)):
            if n >= first:
                stream = step(stream)
        assert stream is not None
        return stream

    def _some(self) -> Iterator[Batch]:
        """The batches of the first sequences alone."""
        some = Scores(self.scores.model, self.scores.sequences[:SEQUENCES], self.scores.versions)
        yield from some.batches()

    def _worst(self, d: Array, logp: Array, relative_NL: Array) -> tuple[WorstToken, ...]:
        found = []
        for place in np.argsort(-np.abs(d), kind="stable")[:_WORST]:
            if d[place] == 0:
                break
            sequence = int(self.scores.of_sequence[place])
            position = int(self.scores.positions[place])
            path = np.maximum(relative_NL[place], _LEAST)
            grown = np.diff(np.log(path), prepend=np.log(_LEAST), append=0.0)
            grown[-1] = 1e-6  # the head, where no layer has a difference
            token = int(self.scores.sequences[sequence].tokens[position])
            both = float(logp[0, place]), float(logp[1, place])
            found.append(WorstToken(sequence, position, token, *both, self.names[int(grown.argmax())]))
        return tuple(found)


class _Sides(ABC):
    """Two ways in which a model is computed: ``sides``, the learner's first, with their kernels."""

    def __init__(self, scores: Scores, sides: tuple[Side, Side]) -> None:
        self.scores, self.sides = scores, sides
        self.kernels = tuple(side.kernels(scores.device) for side in sides)

    @abstractmethod
    def steps(self, batch: Batch, side: int) -> Iterator[Callable[[_Stream | None], _Stream]]:
        """The embedding and each layer as functions of the stream before, as ``side`` computes them."""

    @abstractmethod
    def head(self, batch: Batch, side: int, stream: _Stream) -> Array:
        """Log-probs of the compared tokens after a stream, by the final norm and head of ``side``."""


class _OfDecoder(_Sides):
    """Our own decoder."""

    @property
    def decoder(self) -> Decoder:
        return self.scores.decoder

    def steps(self, batch: Batch, side: int) -> Iterator[Callable[[_Stream | None], _Stream]]:
        """The embedding and each layer as functions of the stream before, as ``side`` computes them."""
        kernels, how = self.kernels[side], self.sides[side]
        positions_1T = torch.arange(batch.tokens_BT.shape[1], device=self.scores.device).unsqueeze(0)
        (cos, sin), attend = self.decoder.config.rotary_angles(positions_1T), attention(kernels, how)

        def embed(_: _Stream | None) -> _Stream:
            with self.scores.weights_of(how, "model.embed_tokens."):
                return kernels.embedding(batch.tokens_BT, self.decoder.model.embed_tokens.weight), None

        yield embed
        for index, layer in enumerate(self.decoder.model.layers):
            assert isinstance(layer, Layer)

            def step(stream: _Stream | None, index: int = index, layer: Layer = layer) -> _Stream:
                assert stream is not None
                with self.scores.weights_of(how, f"model.layers.{index}."):
                    found: _Stream = layer(*stream, cos, sin, index, attend, None, kernels)
                    return found

            yield step

    def head(self, batch: Batch, side: int, stream: _Stream) -> Array:
        """Log-probs of the compared tokens after a stream, by the final norm and head of ``side``."""
        kernels, how = self.kernels[side], self.sides[side]
        x, added = stream
        with self.scores.weights_of(how, "model.norm."), self.scores.weights_of(how, self._head_name):
            hidden = self.decoder.model.norm.of_sum(x, added, kernels)[1]
            return self.scores.logp(kernels, how, batch.before(hidden), batch)

    @property
    def _head_name(self) -> str:
        return "model.embed_tokens." if self.decoder.lm_head is None else "lm_head."


class _OfTransformers(_Sides):
    """A model of transformers: its layers are called one by one with what its own forward gave them beside the stream.

    ``MantissaError`` where that is not how the model computes: its layers then pass more on than one stream.
    """

    def __init__(self, scores: Scores, sides: tuple[Side, Side]) -> None:
        super().__init__(scores, sides)
        assert isinstance(scores.model, AnyModel)
        self.model = scores.model
        self.layers = self.model.layers
        self._batch: Batch | None = None
        self._calls: dict[int, list[_Call]] = {}
        self._check(next(scores.batches()))

    def _check(self, batch: Batch) -> None:
        stream = _done(self.steps(batch, 0))[-1]
        with torch.no_grad():
            direct = self.scores.all([self.sides[0]])[0][batch.places]
        if not np.array_equal(self.head(batch, 0, stream), direct):
            raise MantissaError(
                f"--by-layer: the layers of {type(self.model.model).__name__} do not pass one stream on, from each to "
                "the next; leave it out"
            )

    def steps(self, batch: Batch, side: int) -> Iterator[Callable[[_Stream | None], _Stream]]:
        calls = self._called(batch, side)
        yield lambda _: (calls[0].stream, None)
        for layer, call in zip(self.layers, calls, strict=True):

            def step(stream: _Stream | None, layer: nn.Module = layer, call: _Call = call) -> _Stream:
                assert stream is not None
                with self._as(side):
                    out = layer(stream[0].to(call.stream.dtype), *call.args, **call.given)
                return (out[0] if isinstance(out, tuple) else out), None

            yield step

    @contextmanager
    def _as(self, side: int) -> Iterator[None]:
        how = self.sides[side]
        with self.scores.weights_of(how), self.model.computing(how, self.kernels[side].format):
            yield

    def _called(self, batch: Batch, side: int) -> list[_Call]:
        """What the model's own forward gives each layer."""
        if self._batch is not batch:
            self._batch, self._calls = batch, {}
        if side not in self._calls:
            calls: list[_Call] = []

            def keep(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
                stream = args[0] if args else given["hidden_states"]
                calls.append(_Call(stream, args[1:], {k: v for k, v in given.items() if k != "hidden_states"}))

            handles = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in self.layers]
            try:
                self._forward(batch, side)
            finally:
                for handle in handles:
                    handle.remove()
            self._calls[side] = calls
        return self._calls[side]

    def _forward(self, batch: Batch, side: int) -> Tensor:
        how = self.sides[side]
        with self.scores.weights_of(how):
            return self.model.logits_of(batch.tokens_BT, batch.positions_BT, how, self.kernels[side].format)

    def head(self, batch: Batch, side: int, stream: _Stream) -> Array:
        x = stream[0].to(self._called(batch, side)[0].stream.dtype)
        for layer in self.layers:
            layer.forward = lambda *_, **__: x  # the model's own forward, of which the layers are left out
        try:
            logits = self._forward(batch, side)
        finally:
            for layer in self.layers:
                del layer.forward
        return self.scores.logp(self.kernels[side], self.sides[side], batch.before(logits), batch)


@dataclass(frozen=True)
class _Call:
    """What one layer was called with: the residual ``stream``, and everything beside it."""

    stream: Tensor
    args: tuple[Any, ...]
    given: dict[str, Any]


def _done(steps: Iterator[Callable[[_Stream | None], _Stream]]) -> list[_Stream]:
    streams: list[_Stream] = []
    for step in steps:
        streams.append(step(streams[-1] if streams else None))
    return streams


def _whole(stream: _Stream) -> Tensor:
    """The residual stream with all that has been computed in it, fp32 and not rounded."""
    x, added = stream
    return x.float() if added is None else x.float() + added.float()


def _rms(x: Any) -> float:
    return float(np.sqrt(np.square(x).mean()))


def layers_plot(found: ByLayer) -> Plot:
    """The relative difference after each layer, what is passed on and what is new; and the shares of d."""
    rows, title = found.rows[:-1], "Where the difference enters, by layer"
    if not any(row.difference for row in rows):
        return Plot(title, "No layer's hidden states differ: the difference is the head's.")
    at = np.arange(len(rows), dtype=float)
    lines = [
        Line("difference", BLUE, at, np.array([row.difference for row in rows])),
        Line("passed on", GREY, at, np.array([row.passed for row in rows]), (4, 3)),
        Line("new", ORANGE, at, np.array([row.new for row in rows])),
        Line("share of d", GREEN, at, np.abs([row.share for row in rows]), (1, 2)),
    ]
    note = f"{found.tokens:,} tokens; 0 is the embedding. Relative to the residual stream's own size; a share's size."
    return chart(title, note, lines, "relative RMS", "log", across="layer")
