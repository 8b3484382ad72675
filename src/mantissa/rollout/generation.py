"""One call of ``generate``: continuous batching over the slots of a key/value cache, and that cache.

Where the policy has mixtures of experts, the experts of every position are noted, and go with its completion: those of
its prompt from the prefill, then one position a step.

Legend: B rows (slots in use), P prompts of one prefill, T prompt positions, K key/value heads, D head size, L layers,
V vocabulary, S slots.

Prompts are prefilled a batch at a time, ahead of need: the keys, values and last logits of a batch stay until every
sample of its prompts has been admitted to a slot, so a prompt is computed once however many samples it has and whenever
they find room, and a slot that falls free is filled again in the same step by a copy. When nothing waits, rows in use
are moved to the front, and the batch shrinks.

For each slot the device holds the last token, its position, how many tokens were sampled, and the key of its uniforms;
the host holds what was sampled. A decode step costs one transfer to the host (tokens and log-probs together), where
stop tokens, lengths and stop strings are looked at.

A stop string is looked for without decoding the whole response after every token. A string of c characters can straddle
tokens: up to c of them, or as many as its UTF-8 bytes where tokens are single bytes, and more where tokens decode to
nothing (special tokens). So a tail is decoded that starts as long as the longest string has bytes and is doubled until
its text is long enough to hold the string with room to spare. A tokenizer may render the first token of a tail
otherwise than inside the text (no leading space, half a character): that is what the room is for, and why a find in the
tail counts only when the whole text has it too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mantissa.base.errors import MantissaError
from mantissa.kernels import Kernels, Pick, Traced
from mantissa.model import Decoder, ModelConfig, Recorded
from mantissa.precision import NumberFormat, round_cached
from mantissa.rollout.sampling import (
    Completion,
    FinishReason,
    Request,
    SamplingParams,
    filter_logits,
    request_keys,
    sample,
    uniforms,
)
from mantissa.rollout.step import Step
from mantissa.rollout.support import MostProbable, Support, encode, most_probable

BUCKET = 16


class KVCache:
    """Keys and values of ``slots`` rows. Values are held in ``dtype``; who writes them has rounded them.

    For each layer one block of keys and one of values, a row a slot, as long as the longest row. Rows in use are kept
    together at the front, and the blocks are kept *packed*: a head's keys are as many positions as the longest row in
    use has (in steps of ``BUCKET``), with nothing behind them. So a decode step attends to a view ``[:B]``, never to a
    gathered copy, and reads memory that lies in one piece. On a CPU that matters more than the copy made at every
    sixteenth step, when the rows outgrow the block: reading the first 64 of 128 positions of each head takes 1.8 to 2.5
    times as long as reading 64 of 64.

    The memory starts as zeros and only finite values enter: a position beyond a row's length has attention weight
    exactly 0, and 0 times a leftover infinity would be NaN.

    Legend: N all slots, S positions.
    """

    def __init__(self, config: ModelConfig, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.slots, self.device = slots, device
        self._heads, self._size, self._dtype = config.num_key_value_heads, config.head_dim, dtype
        self._blocks = 2 * config.num_hidden_layers  # keys and values of a layer lie at 2 * layer and 2 * layer + 1
        self._row_heads_NK = torch.arange(slots * self._heads, device=device).view(slots, self._heads)
        self._stream: torch.cuda.Stream | None = None
        self.clear()

    def clear(self) -> None:
        """Forget everything, memory included: after non-finite values, which would outlive their row."""
        self.length = 0  # positions of a row in the present packing
        self._flat = [torch.zeros(0, dtype=self._dtype, device=self.device) for _ in range(self._blocks)]
        self._spare = self._flat[0].clone()
        self._see()

    def restart(self) -> None:
        """Before a new set of rows: pack anew, so that nothing depends on what was held before. Memory is kept.

        Memory that was taken on another CUDA stream is given back instead: freed later, while this stream still reads
        it, it would be that stream's to overwrite.
        """
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        if stream != self._stream:
            self._stream = stream
            self.clear()
        self.length = 0

    def fit(self, length: int, rows: int) -> None:
        """Pack the blocks for ``length`` positions a row, keeping the first ``rows`` rows as far as they fit.

        Longer than now: at once. Shorter: only by a good part, since packing is a copy. One block more than the cache's
        own is kept, into which each is packed in turn.
        """
        length = -(-length // BUCKET) * BUCKET
        if self.length * 3 // 4 <= length <= self.length:
            return
        kept = min(length, self.length)
        elements = self.slots * self._heads * length * self._size
        old_views, self.length = self._views_NKSD, length
        for index, old_NKSD in enumerate(old_views):
            if self._spare.numel() < elements:
                roomy = elements if self._spare.numel() == 0 else max(elements, self._spare.numel() * 3 // 2)
                self._spare = torch.zeros(roomy, dtype=self._dtype, device=self.device)
            self._view(self._spare)[:rows, :, :kept] = old_NKSD[:rows, :, :kept]
            self._flat[index], self._spare = self._spare, self._flat[index]
        self._see()

    def _see(self) -> None:
        """Make the views of the blocks as they are packed now."""
        self._views_NKSD = [self._view(flat) for flat in self._flat]
        self._vectors_nD = [view.view(-1, self._size) for view in self._views_NKSD]
        self.pointers = [flat.data_ptr() for flat in self._flat]  # of keys and values, layer by layer
        self._used_BKSD: list[Tensor] = []  # the rows in use, as of the last ``append``

    def _view(self, flat: Tensor) -> Tensor:
        shape = (self.slots, self._heads, self.length, self._size)
        return flat[: self.slots * self._heads * self.length * self._size].view(shape)

    def places(self, positions_B: Tensor) -> Tensor:
        """Where position ``positions_B[b]`` of row b lies, for each head, counted in heads' vectors. int64, B*K."""
        return (self._row_heads_NK[: positions_B.shape[0]] * self.length + positions_B.unsqueeze(1)).flatten()

    def append(self, layer: int, k_BK1D: Tensor, v_BK1D: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Write one position of each of the first B rows; return all keys and values of those rows, B,K,S,D."""
        rows, keys, values = k_BK1D.shape[0], 2 * layer, 2 * layer + 1
        if not self._used_BKSD or len(self._used_BKSD[0]) != rows:
            self._used_BKSD = [view[:rows] for view in self._views_NKSD]
        self._vectors_nD[keys].index_copy_(0, places, k_BK1D.reshape(-1, self._size))
        self._vectors_nD[values].index_copy_(0, places, v_BK1D.reshape(-1, self._size))
        return self._used_BKSD[keys], self._used_BKSD[values]

    def admit(self, slots_B: Tensor, kv_2LPKSD: Tensor, prompts_B: Tensor) -> None:
        """Copy the prefilled prompt ``prompts_B[b]`` into slot ``slots_B[b]``."""
        length = kv_2LPKSD.shape[4]
        for index, block_NKSD in enumerate(self._views_NKSD):
            prompts_PKSD = kv_2LPKSD[index % 2, index // 2]
            block_NKSD[:, :, :length].index_copy_(0, slots_B, prompts_PKSD.index_select(0, prompts_B))

    def move(self, source_B: Tensor, target_B: Tensor) -> None:
        """Copy rows ``source_B`` over rows ``target_B``."""
        for block_NKSD in self._views_NKSD:
            block_NKSD.index_copy_(0, target_B, block_NKSD.index_select(0, source_B))


_ROOM = 8  # characters at the start of a tail that may be rendered otherwise than in the whole text


class StopStrings:
    """``completed(tokens)`` after each token says whether one of ``stop`` is in the text of ``tokens``."""

    def __init__(self, stop: Sequence[str], decode_text: Callable[[Sequence[int]], str]) -> None:
        self._stop, self._decode = tuple(stop), decode_text
        self._characters = max(len(text) for text in stop) + _ROOM
        self._tokens = max(len(text.encode()) for text in stop) + _ROOM

    def completed(self, tokens: Sequence[int]) -> bool:
        """True where the text of ``tokens`` ends in or holds a stop string; call it after every token."""
        size = self._tokens
        text = self._decode(tokens[-size:])
        while size < len(tokens) and len(text) < self._characters:
            size *= 2
            text = self._decode(tokens[-size:])
        if not self._found(text):
            return False
        return size >= len(tokens) or self._found(self._decode(tokens))

    def _found(self, text: str) -> bool:
        return any(stop in text for stop in self._stop)


_PREFILL_TOKENS = 16384  # of one prefill, padding included: bounds its activations
_Beside = tuple[NDArray[np.int32] | None, MostProbable | None]  # of one token: its support's words, the most probable
_TOKEN, _POSITION, _COUNT, _KEY = range(4)  # rows of the device's state


_Route = tuple[Tensor, Tensor | None]  # experts (int16) of some positions in each mixture, S,L,K, and their weights


@dataclass
class _Prefilled:
    """A batch of computed prompts: keys and values (2,L,P,K,T,D), last logits (P,V) and lengths (P).

    ``jobs`` are its samples in order of admission, of which the first ``admitted`` have a slot; ``rows`` their prompts.
    ``routes``: the experts of each prompt's positions, where there are some.
    """

    kv: Tensor
    logits: Tensor
    lengths: Tensor
    jobs: np.ndarray
    rows: np.ndarray
    routes: list[_Route]
    admitted: int = 0


@dataclass
class Generation:
    """The state of one call. ``run`` returns the completions of every request, in order.

    ``watched``: the number of a job (a sample; all of all requests, in order) that ``kernels``, traced, take notes of.
    ``forced``: for each job the tokens that it has to take, whatever is drawn; None where it may draw.
    ``expert_weights``: note the weights of the experts too.
    ``interrupted``: asked before every step; once it says so, what is not finished ends as it is.
    ``step``: a decode step of ``model`` by ``kernels`` as one call; None: operation by operation.
    """

    model: Decoder
    kernels: Kernels
    kv_format: NumberFormat
    cache: KVCache
    requests: Sequence[Request]
    params: SamplingParams
    version: int
    decode_text: Callable[[Sequence[int]], str] | None
    watched: int | None = None
    forced: Sequence[Sequence[int] | None] | None = None
    expert_weights: bool = False
    interrupted: Callable[[], bool] = lambda: False
    step: Step | None = None

    def __post_init__(self) -> None:
        self.slots, self.device = self.cache.slots, self.cache.device
        self._jobs = jobs = [(i, j) for i, request in enumerate(self.requests) for j in range(request.samples)]
        keys_J = request_keys(self.requests)
        self._key_of, self._keys_J = keys_J.tolist(), keys_J.to(self.device)
        self._forced_J = np.zeros(len(jobs), dtype=np.int64)  # how many tokens a job has to take; 0: none
        self._forced_JT: Tensor | None = None
        if self.forced is not None:
            self._forced_J[:] = [len(tokens or ()) for tokens in self.forced]
            table = torch.full((len(jobs), int(self._forced_J.max(initial=0))), -1)
            for row, tokens in zip(table, self.forced, strict=True):
                row[: len(tokens or ())] = torch.tensor(tokens or (), dtype=torch.int64)
            self._forced_JT = table.to(self.device)
        waiting: dict[tuple[int, ...], list[int]] = {}
        for job, (i, _) in enumerate(jobs):
            waiting.setdefault(self.requests[i].prompt_tokens, []).append(job)
        # Taken from the end, so longest first: prompts prefilled together are of like length.
        self._queue = sorted(waiting.items(), key=lambda item: len(item[0]))
        self._ready: _Prefilled | None = None
        self._completions: list[list[Completion | None]] = [[None] * r.samples for r in self.requests]

        self._state_4S = torch.zeros(4, self.slots, dtype=torch.int64, device=self.device)
        self._active = 0
        self._job_S = np.full(self.slots, -1)
        self._count_S = np.zeros(self.slots, dtype=np.int64)
        self._length_S = np.zeros(self.slots, dtype=np.int64)  # positions cached
        self._tokens_ST = np.zeros((self.slots, self.params.max_tokens), dtype=np.int64)
        self._logp_ST = np.zeros((self.slots, self.params.max_tokens), dtype=np.float32)
        self._unfiltered = replace(self.params, top_k=0, top_p=1.0)
        # Of each slot what is kept beside its tokens, token after token; None where nothing is.
        draws = self.params.temperature > 0 and (self.params.truncates or self.params.most_probable > 0)
        self._beside_S = np.full(self.slots, None) if draws else None
        self._route = Recorded(self.expert_weights) if self.model.config.sparse_layers else None
        self._routes_S: list[list[_Route]] = [
            [] for _ in range(self.slots)
        ]  # of each slot: its prompt's, then a step's
        self._stops_V = np.zeros(self.model.config.vocab_size, dtype=bool)
        self._stops_V[list(self.params.stop_token_ids)] = True
        self._stop_strings = None
        if self.params.stop and self.decode_text is not None:
            self._stop_strings = StopStrings(self.params.stop, self.decode_text)

    def run(self) -> list[list[Completion]]:
        """Sample everything."""
        holes = np.arange(0)
        while not self.interrupted():
            self._admit(holes)
            if not self._active:
                break
            holes = self._decode_step()
        else:
            self._close(holes)
        self._abort()
        return [[completion for completion in row if completion is not None] for row in self._completions]

    # Decode

    def _decode_step(self) -> np.ndarray:
        """One token for every row in use. Returns the slots that finished."""
        rows = self._active
        self.cache.fit(int(self._length_S[:rows].max()) + 1, rows)
        state_4B = self._state_4S[:, :rows]
        lengths_B = state_4B[_POSITION] + 1
        places = self.cache.places(state_4B[_POSITION])

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = self._cached(k), self._cached(v)
            keys, values = self.cache.append(layer, k, v, places)
            return self.kernels.cached_attention(q.squeeze(2), keys, values, lengths_B).unsqueeze(2)

        self._watch(self._job_S[:rows], lambda slot: _token_in(slot, int(self._length_S[slot])))
        if self.step is not None:
            given = state_4B[_TOKEN], state_4B[_POSITION], lengths_B
            hidden_BE = self.step(*given, self.cache.pointers, self.cache.length)
        else:
            tokens_B1, positions_B1 = state_4B[_TOKEN].unsqueeze(1), state_4B[_POSITION].unsqueeze(1)
            hidden_B1E = self.model.hidden(tokens_B1, self.kernels, positions_B1, attend, self._route)
            hidden_BE = hidden_B1E.squeeze(1)
        if self._route is not None:
            for slot, route in enumerate(_split(self._route.take(), [1] * rows)):
                self._routes_S[slot].append(route)
        logits_BV = self.model.logits(hidden_BE, self.kernels)
        self._length_S[:rows] += 1
        u_B, forced_B = (
            uniforms(state_4B[_KEY], state_4B[_COUNT]),
            self._forced(self._job_S[:rows], self._count_S[:rows]),
        )
        tokens_B, logp_B, kept = self._sample(logits_BV, u_B, forced_B)
        state_4B[_TOKEN] = tokens_B
        state_4B[_POSITION : _COUNT + 1] += 1
        return self._record(np.arange(rows), tokens_B, logp_B, kept)

    def _cached(self, x: Tensor) -> Tensor:
        """Keys or values as the cache holds them: in the kernels' own format they are on its grid already."""
        return x if self.kv_format is self.kernels.format else round_cached(x, self.kv_format)

    def _sample(
        self, logits_BV: Tensor, u_B: Tensor, forced_B: Tensor | None
    ) -> tuple[Tensor, Tensor, list[_Beside] | None]:
        """Tokens, their log-probs, and what is kept beside each."""
        kept_BV = filter_logits(logits_BV, self.params)
        drawn = sample(kept_BV, self._unfiltered, u_B, self.kernels.token_logprob, forced_B)
        if self._beside_S is None:
            return *drawn, None
        rows, count = len(logits_BV), self.params.most_probable
        supports = [None] * rows if kept_BV is logits_BV else encode(kept_BV != -torch.inf)
        tops: Sequence[MostProbable | None] = [None] * rows
        if count:
            tops = most_probable(kept_BV, self.params.temperature, count).split([1] * rows)
        return *drawn, list(zip(supports, tops, strict=True))

    def _forced(self, jobs: np.ndarray, counts: np.ndarray) -> Tensor | None:
        """The token that each of ``jobs`` has to take next, -1 where it may draw; None where all may."""
        if self._forced_JT is None:
            return None
        inside = counts < self._forced_J[jobs]
        at = torch.from_numpy(np.stack((jobs, np.where(inside, counts, 0)))).to(self.device)
        return self._forced_JT[at[0], at[1]].masked_fill(torch.from_numpy(~inside).to(self.device), -1)

    # Prefill and admission

    def _admit(self, holes: np.ndarray) -> None:
        """Fill ``holes`` and the unused slots from what waits; then close the holes that remain."""
        while self._ready or self._queue:
            free = np.concatenate((holes, np.arange(self._active, self.slots)))
            if not len(free):
                return
            ready = self._ready or self._prefill(len(free))
            stop = min(len(ready.jobs), ready.admitted + len(free))
            jobs, rows = ready.jobs[ready.admitted : stop], ready.rows[ready.admitted : stop]
            ready.admitted = stop
            self._ready = ready if stop < len(ready.jobs) else None
            filled, holes = free[: len(jobs)], holes[len(jobs) :]
            self._active = max(self._active, int(filled.max()) + 1)
            finished = self._enter(filled, jobs, rows, ready)
            holes = np.sort(np.concatenate((holes, finished)))
        self._close(holes)

    def _enter(self, slots: np.ndarray, jobs: np.ndarray, rows: np.ndarray, ready: _Prefilled) -> np.ndarray:
        """Copy prompts into ``slots`` and sample their first tokens. Returns the slots that finished with them."""
        slots_B, jobs_B, rows_B = (torch.from_numpy(x).to(self.device) for x in (slots, jobs, rows))
        longest = max(ready.kv.shape[4], int(self._length_S[: self._active].max(initial=0)) + 1)
        self.cache.fit(longest, self._active)
        self.cache.admit(slots_B, ready.kv, rows_B)
        keys_B = self._keys_J[jobs_B]
        lengths_B = ready.lengths[rows_B]
        first = torch.zeros_like(keys_B)
        self._watch(jobs, lambda row: _token_in(row, int(lengths_B[row]) - 1))
        u_B, forced_B = uniforms(keys_B, first), self._forced(jobs, np.zeros_like(jobs))
        tokens_B, logp_B, kept = self._sample(ready.logits[rows_B], u_B, forced_B)
        self._state_4S[:, slots_B] = torch.stack((tokens_B, lengths_B, first + 1, keys_B))
        self._job_S[slots], self._count_S[slots] = jobs, 0
        for slot, row in zip(slots, rows, strict=True):
            self._routes_S[slot] = ready.routes[row : row + 1]
        self._length_S[slots] = lengths_B.cpu().numpy()
        if self._beside_S is not None:
            for slot in slots:
                self._beside_S[slot] = []
        return self._record(slots, tokens_B, logp_B, kept)

    def _prefill(self, free: int) -> _Prefilled:
        """Compute the next prompts: enough samples for ``free`` slots, or a quarter of all, within the token limit."""
        batch: list[tuple[tuple[int, ...], list[int]]] = []
        wanted, samples = max(free, self.slots // 4), 0
        longest = len(self._queue[-1][0])
        while self._queue and samples < wanted and (not batch or (len(batch) + 1) * longest <= _PREFILL_TOKENS):
            batch.append(self._queue.pop())
            samples += len(batch[-1][1])
        lengths = [len(prompt) for prompt, _ in batch]
        tokens_PT = torch.zeros(len(batch), longest, dtype=torch.int64)
        for row, (prompt, _) in enumerate(batch):
            tokens_PT[row, : len(prompt)] = torch.tensor(prompt)
        lengths_P = torch.tensor(lengths, device=self.device)
        self._watch([waiting for _, waiting in batch], lambda row: _prompt_in(row, lengths[row]))
        kv, logits_PV = self._prefill_forward(tokens_PT.to(self.device), lengths_P, min(lengths) < longest)
        routes: list[_Route] = []
        if self._route is not None:
            whole = _split(self._route.take(), [longest] * len(batch))
            routes = [
                next(_split(route, [length, longest - length])) for route, length in zip(whole, lengths, strict=True)
            ]
        jobs = np.array([job for _, waiting in batch for job in waiting])
        rows = np.repeat(np.arange(len(batch)), [len(waiting) for _, waiting in batch])
        return _Prefilled(kv, logits_PV, lengths_P, jobs, rows, routes)

    def _prefill_forward(self, tokens_PT: Tensor, lengths_P: Tensor, padded: bool) -> tuple[Tensor, Tensor]:
        """Keys and values of right-padded prompts (zeros where padded), and the logits after each prompt's end."""
        config, (prompts, longest) = self.model.config, tokens_PT.shape
        shape = (2, config.num_hidden_layers, prompts, config.num_key_value_heads, longest, config.head_dim)
        kv_2LPKTD = torch.empty(shape, dtype=self.kernels.dtype, device=self.device)
        positions_1T = torch.arange(longest, device=self.device).unsqueeze(0)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = self._cached(k), self._cached(v)
            kv_2LPKTD[0, layer], kv_2LPKTD[1, layer] = k, v
            return self.kernels.causal_attention(q, k, v)

        hidden_PTE = self.model.hidden(tokens_PT, self.kernels, positions_1T, attend, self._route)
        last_PE = hidden_PTE[torch.arange(prompts, device=self.device), lengths_P - 1]
        if padded:
            kv_2LPKTD.masked_fill_((positions_1T >= lengths_P.unsqueeze(1))[:, None, :, None], 0.0)
        return kv_2LPKTD, self.model.logits(last_PE, self.kernels)

    def _close(self, holes: np.ndarray) -> None:
        """Move the last rows in use into ``holes``, so that the rows in use are the first again."""
        if not len(holes):
            return
        left = self._active - len(holes)
        target = holes[holes < left]
        source = np.setdiff1d(np.arange(left, self._active), holes)
        self._active = left
        if not len(target):
            return
        source_B, target_B = torch.from_numpy(source).to(self.device), torch.from_numpy(target).to(self.device)
        self.cache.move(source_B, target_B)
        self._state_4S[:, target_B] = self._state_4S[:, source_B]
        for per_slot in (self._job_S, self._count_S, self._length_S, self._tokens_ST, self._logp_ST, self._beside_S):
            if per_slot is not None:
                per_slot[target] = per_slot[source]
        for to, of in zip(target, source, strict=True):
            self._routes_S[to] = self._routes_S[of]

    def _watch(self, jobs_of_rows: Iterable[Any], pick: Callable[[int], Pick]) -> None:
        """Before a forward: tell the kernels which row is the watched sample's. A row has one job or several."""
        if self.watched is not None:
            row = next((row for row, jobs in enumerate(jobs_of_rows) if self.watched in np.atleast_1d(jobs)), None)
            assert isinstance(self.kernels, Traced)
            self.kernels.begin(None if row is None else pick(row))

    # Results

    def _record(self, slots: np.ndarray, tokens_B: Tensor, logp_B: Tensor, kept: list[_Beside] | None) -> np.ndarray:
        """Take the sampled tokens to the host, turn finished rows into completions, and return their slots."""
        tokens, logp = torch.stack((tokens_B.double(), logp_B.double())).cpu().numpy()  # one transfer; both exact
        if self.forced is None and not np.isfinite(logp).all():  # a token that has to be taken may be impossible
            raise MantissaError(
                f"policy version {self.version} gives non-finite logits in {self.kernels.format}, expected finite: an "
                "activation overflowed or the weights diverged; use a format with more range (bf16, fp32) or an "
                "earlier checkpoint"
            )
        tokens = tokens.astype(np.int64)
        counts = self._count_S[slots]
        self._tokens_ST[slots, counts] = tokens
        self._logp_ST[slots, counts] = logp
        if self._beside_S is not None and kept is not None:
            for slot, beside in zip(slots, kept, strict=True):
                self._beside_S[slot].append(beside)
        self._count_S[slots] = counts = counts + 1
        stopped = self._stops_V[tokens]
        if self._stop_strings is not None:
            for i in np.flatnonzero(~stopped):
                stopped[i] = self._stop_strings.completed(self._tokens_ST[slots[i], : counts[i]].tolist())
        length = self._forced_J[self._job_S[slots]]
        finished = np.where(length > 0, counts >= length, stopped | (counts >= self.params.max_tokens))
        for i in np.flatnonzero(finished):
            self._complete(int(slots[i]), "stop" if stopped[i] else "length")
        return slots[finished]

    def _abort(self) -> None:
        """End what is not finished: rows in use with the tokens that they have, what waits with none."""
        for slot in range(self._active):
            self._complete(slot, "abort")
        for job, (request, number) in enumerate(self._jobs):
            if self._completions[request][number] is None:
                nothing = Completion((), torch.zeros(0), "abort", self.version, self._key_of[job])
                self._completions[request][number] = nothing

    def _complete(self, slot: int, reason: FinishReason) -> None:
        beside = list(zip(*(self._beside_S[slot] or ()), strict=True)) if self._beside_S is not None else []
        words, tops = beside or ((None,), (None,))
        count, (request, number) = int(self._count_S[slot]), self._jobs[self._job_S[slot]]
        experts, weights = _joined(self._routes_S[slot])
        self._completions[request][number] = Completion(
            tokens=tuple(self._tokens_ST[slot, :count].tolist()),
            logp_T=torch.tensor(self._logp_ST[slot, :count]),
            finish_reason=reason,
            policy_version=self.version,
            key=self._key_of[self._job_S[slot]],
            experts_SLK=experts,
            expert_weights_SLK=weights,
            support=None if words[0] is None else Support.of(words),
            most_probable=None if tops[0] is None else MostProbable.join(tops),
        )


def _split(route: _Route, lengths: list[int]) -> Iterator[_Route]:
    """The routes of so many positions each."""
    experts, weights = route
    parts = experts.split(lengths)
    return zip(parts, [None] * len(parts) if weights is None else weights.split(lengths), strict=True)


def _joined(routes: list[_Route]) -> tuple[Tensor | None, Tensor | None]:
    """One route of all their positions; None where there are none."""
    if not routes:
        return None, None
    weights = [weights for _, weights in routes if weights is not None]
    return torch.cat([experts for experts, _ in routes]), torch.cat(weights) if weights else None


def _prompt_in(row: int, length: int) -> Pick:
    """Every position of the prompt in ``row`` of a prefill, whose logits are those of its end."""

    def pick(kind: str, rows: Tensor) -> tuple[Tensor, Tensor]:
        if kind == "logits":
            return rows[row : row + 1], torch.tensor([length - 1], device=rows.device)
        return rows[row, :length], torch.arange(length, device=rows.device)

    return pick


def _token_in(slot: int, position: int) -> Pick:
    """The one position that a decode step computes for a slot."""

    def pick(kind: str, rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows[slot : slot + 1], torch.tensor([position], device=rows.device)

    return pick
