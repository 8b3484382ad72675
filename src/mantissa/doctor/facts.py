"""The table ``facts.yaml``: what each fault means, and what to set in whose keys; and what is usual for a dump.

Below it the bounds of a verdict that are not of one signature alone; what is one signature's is in its row.

u = d / (1 - p) is of the size of the logits' error (``sample.py``); *the usual* is the largest root mean square of u
of a healthy gap in the formats at hand (``facts.usual``).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from mantissa.base.readers.yaml import read_shipped
from mantissa.doctor.diagnosis import CauseKind, Which
from mantissa.doctor.dump import Settings
from mantissa.mismatch.usual import Usual, usual


@dataclass(frozen=True)
class Mixture:
    """Share of uncertain tokens that a healthy mixture of experts has beyond the usual of its formats, at most."""

    beyond: float
    source: str


@dataclass(frozen=True)
class Part:
    """What a signature is in a verdict.

    ``of``: it says what the ``value`` of a log-prob is, that one ``law`` moves all, or at which ``place`` they differ;
    and where nothing explains the gap, its ``shape`` and ``size``. ``unless``: what says more of the same sequences.
    ``one_side``: it is seen in one side's log-probs alone. ``left_out``: it says what was not compared. ``routers``:
    it is not told from ``few`` tokens that other experts had, or from ``many``. ``rounding``: a habit, and no fault
    where the gap is of the usual size. ``remark``: and so in a gap of up to so many times the usual. ``tries``: what
    a model is asked about first, where log-probs leave more than one cause; None where there is one. ``alone``: nothing
    else is judged of such numbers.
    """

    of: Literal["value", "law", "place", "shape", "size"] = "value"
    unless: tuple[str, ...] = ()
    one_side: bool = False
    left_out: bool = False
    routers: tuple[Literal["few", "many"], ...] = ()
    rounding: bool = False
    remark: float = 0.0
    tries: tuple[CauseKind, ...] | None = None
    alone: bool = False


@dataclass(frozen=True)
class Fault:
    """A signature. ``remedies``: the most fitting first; ``larger``: where the gap is beyond what fp8 makes, which
    another precision cannot explain, these instead. ``decide``: what tells apart the causes that log-probs
    cannot, empty where there is one; ``rest``: what it is where a model gives one side's log-probs back and no cause.
    ``bounds``: of its test, by the names that the test has for them."""

    title: str
    means: str
    remedies: tuple[str, ...]
    larger: tuple[str, ...] = ()
    decide: str = ""
    rest: str = "no cause that was tried explains it"
    verdict: Part = Part()
    bounds: dict[str, int | float | tuple[int | float, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class OfModel:
    """A cause that a model tells: ``said``, a format string; ``remedies``, of either side or of each.

    ``tried``: where a fault is open, fields of a side that it changes, and ``what`` says them. ``turn``: the smallest
    comes first; up to that of ``weights``, whatever the fault is.
    """

    said: str
    remedies: tuple[str, ...] | dict[str, tuple[str, ...]]
    fault: bool = False
    turn: int = 0
    tried: tuple[dict[str, int | float | str], ...] = ()

    def helps(self, side: Which | None) -> tuple[str, ...]:
        """The remedies where it is in ``side``."""
        return self.remedies[str(side)] if isinstance(self.remedies, dict) else self.remedies


@dataclass(frozen=True)
class Remedy:
    """What to do, and the keys for it by framework."""

    do: str
    keys: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Facts:
    """All of the table."""

    mixture: Mixture
    faults: dict[str, Fault]
    causes: dict[CauseKind, OfModel]
    remedies: dict[str, Remedy]


@functools.cache
def facts() -> Facts:
    """The table, read once; a field that no row of its kind has is an error."""
    given = unchanging(read_shipped(Path(__file__).with_name("facts.yaml")))
    return Facts(
        Mixture(**given["mixture"]),
        {name: Fault(**row | {"verdict": _part(row.get("verdict", {}))}) for name, row in given["faults"].items()},
        {CauseKind(name): OfModel(**row) for name, row in given["causes"].items()},
        {name: Remedy(**row) for name, row in given["remedies"].items()},
    )


def _part(row: dict[str, Any]) -> Part:
    tries = row.get("tries")
    return Part(**row | {"tries": None if tries is None else tuple(map(CauseKind, tries))})


def unchanging(value: Any) -> Any:
    """A table's value with tuples for its lists."""
    if isinstance(value, dict):
        return {key: unchanging(each) for key, each in value.items()}
    return tuple(map(unchanging, value)) if isinstance(value, list) else value


def part(signature: str) -> Part:
    """What a signature is in a verdict."""
    return facts().faults[signature].verdict


def formats(settings: Settings) -> tuple[str | None, str | None]:
    """A dump's two formats, as far as it names them."""
    return settings.rollout_format, settings.learner_format


def usual_of(settings: Settings) -> Usual:
    """What is usual in a dump's formats at its temperature; where the job's own healthy size is known, that instead."""
    found = usual(formats(settings), settings.temperature)
    return found if settings.healthy_size is None else found.of_job(settings.healthy_size)


# a test
FEWEST = 8  # units
LEVEL = 0.05  # of a false alarm in a healthy dump, over all tests together
POWER = 0.95  # of finding what is called detectable
PROMPTS = 12  # from so many on they are the units: p is never below 2 ** -units, and 28 tests share the level
CERTAIN = 0.01  # of 1 - p: below it a token says nothing
LIKELIEST = float(np.log(0.55))  # nats: above it a token is the likeliest of its context, whatever the others are
SAME = 1e-6  # nats: a certain token's log-prob, or two that are one
ABOVE_ZERO = 1e-3  # nats: what rounding may make of a certain token's log-prob
PAIRS = 10  # of words in one context, for a decision by them
CAP = 5.0  # of |u| where only agreement counts
WORST = 20.0  # nats: what is further apart counts as so much
FAR = 4.0  # times the usual: twelve root mean squares of a healthy gap
MATTERS = 0.1  # of the usual: a part below it is rounding that fell otherwise
OWN = 30.0  # times as large as another part of the same dump: that part is then the usual
GRID = 0.99  # of 20 values or more, that lie on a grid
SURE_ZERO = (-1.0, -1e-3)  # nats: a 0 beside the first is no probability; nor are the side's others beside the second
CUT_LAW = (-0.01, 0.02, 0.05)  # nats; of a cut law's other values at most so many above; and of all so many are 0

# from findings to a verdict
ENOUGH = 0.5  # of sum d^2: what explains less is no verdict
PARTLY = 0.3  # enough where the whole is of a healthy size, and a part of it is not; healthy kinds have up to 0.23
AS_MUCH = 0.1  # of sum d^2: shares that are so near are alike
LITTLE = 0.25  # of sum d^2: the first of two faults may explain so little
TOGETHER = 0.65  # and both together so much
SECOND = 0.1  # of sum d^2, that a second fault must hold at least
FEW_OUT = 0.02  # of the tokens: what leaves out fewer does not make a gap of the others
WORTH = 0.001  # of sum d^2: beside a fault, a habit that explains less is no news
CURVE = 0.6  # of sum d^2 on a curve in the log-prob: a law is in it, and a shape may be the law's
MOST_ALONE, ONE_WAY = 0.5, 0.95  # of sum d^2 in single tokens, or of one sign: its shape is none of a whole gap
ALIKE = 0.1  # correlation of u over the same token: other weights have as much or more
NOTHING = 1e-5  # nats, root mean square of d: below it nothing is to be done, whatever the formats
TWICE = 0.25  # of the sequences stand there before: then each counts once
LONG = 8  # tokens of a response: so many are not drawn twice
COPIED = 0.05  # of the sequences, equal on both sides to the last bit where others are not
BLIND = 10.0  # times the usual: a sample that would not show so much says nothing
HEALTHY_SEQUENCES, HEALTHY_TOKENS = 2 * FEWEST, 64  # for a verdict where nothing is found
SINGLE = (3.0, 0.5)  # times the usual, with single tokens; of which more than so are neither first nor last

QUARTERS = 4  # of the prompts: whichever is left out, what is named is named by the rest, or nothing is

# what a name needs (signatures.py); by four sets of dumps of other hands, each left out in turn
ALONE = ("end_token", "first_token", "turn", "onset", "padding", "capacity", "soft_cap")  # the rest is healthy
MOST_OF_IT = 0.75  # of sum d^2, that such a place holds: right ones held 0.89 and more, wrong ones 0.24 to 0.69
# Of sum d^2, that a formula of what was saved explains: right ones did 0.999 (a smoothed loss, whose mean over the
# vocabulary is each context's own, 0.976), wrong ones 0.97 (0.88).
FORMULAS = {"raised": 0.98, "smoothed": 0.93}
# Claims of a sign, steps of few contexts.
BY_LITTLE = ("support", "logit_bias", "min_tokens", "onset", "mid_sequence", "prompt")
SURELY_SO = 0.01  # their p: wrong ones had 0.02 and 0.03, right ones 0.002
# What is of every context is foretold by no place: of log |u| such laws have up to 0.1, a grammar 0.29, an end that was
# banned at first and called "words" 0.83.
NO_PLACE = ("support", "temperature", "soft_cap", "argmax", "logit_bias", "raised", "smoothed", "unrelated")
PLACED = 0.4
NEVER_BELOW, ONE_LAW = 0.95, 0.98  # of tokens: one side is above; two words of one context have no more than 1 together
NEAR = 0.9  # of the gap: a line or a curve that explains so much is as good as the law
IN_CONTEXT = (
    5.0  # standard errors, of how words of one context move with their log-prob: laws have up to 2.2 (one of 4)
)
FORETOLD = 0.9  # of the squares of what other sequences foretell: biases have 0.99 and more, broken layers up to 0.77
FEWEST_TOLD = 3  # tokens, that are foretold
OWN_TOKEN = 0.4  # of a difference is the same in all prompts: what is no weights leaves up to 0.32, weights 0.34 on
FEWEST_CERTAIN = 20  # tokens, whose differences are
ONE_NUMBER = 0.25  # of their median, the quartiles' distance: a smoothed loss has 0.1, laws that cut have 1 and more
APART = 4.0  # times: the padded prompts' sizes over the longest's
BY_LENGTH = 0.4  # rank correlation of sequences' sizes with their prompts' lengths
FIRST_ONES = 0.75  # of the tokens at whose beginning an end is ruled out: half of those that differ lie before
FEW_ROWS = 3  # sequences on either side, for a doubt by them
IN_MOST = 0.05  # of the size at a place, the median sequence's there: where some rows alone differ it is rounding's
ZEROS = 0.95  # of the tokens beyond the usual, exactly 0 on one side: cut laws have up to 0.87
STRANGERS = 0.2  # rank correlation of both sides' log-probs: of other tokens up to 0.16, of a broken model 0.28
RELATED = 0.5  # correlation of both sides' log-probs: dropout leaves 0.7
VAGUE = ("position", "single_tokens", "experts")  # places that are no rival: they are there beside others
ANYWHERE = ("mid_sequence", "some_sequences", "position", "onset")  # what tokens that are one place apart look like

# a law that one side's samples obey and the other's log-probs do not (rules.py)
ONE_SIDED = (2.0, 8.0, 0.125)  # far: times the usual, or times the size of the rarer sign's, and of the usual at least
COUNTED = 1.5  # nats: of what differs by more, one sign alone is likely
WORDS = 6  # different ones, at least, for a decision by them
NOISE = 6.0  # times the usual: the largest |u| of noise

# a mixture of experts (examine.py)
FLYING = 0.3  # of sum (u / own sequence's size)^2 in a hundredth of the tokens: 0.09 to 0.18 without experts, 0.36 on
THROUGHOUT = 0.5  # of a sequence's tokens beyond the usual: it differs throughout
AT_A_PLACE = 0.25  # so much more of the first, or of the last tokens beyond the usual than of others: it is the place
MEDIAN, AT_THE_USUAL = 0.6745, 0.3173  # of |x|, and the share of |x| above 1, of a standard normal x
MOST_ROUTED = 1.0  # nats, root mean square of d: so much is healthy in no mixture, whoever made it
MOST_FLY = 0.9  # of the tokens beyond the usual: if routers make so much, that is as bad as a fault
RULE = 0.5  # of sum u^2 in tokens far beyond the usual: they rule the gap

# what stands in place of a log-prob (evidence.py)
NEVER = 1000.0  # nats: no softmax of a model gives so little, be it once; above, nothing is a log-prob
DRAWN = -28.0  # nats: of 4 million tokens and 250,000 words, none that was sampled is expected below
RARE = -9.0  # nats: from here on a value that is repeated is looked at
CONSTANT = 3  # times, of a whole number
REPEATED = 8  # times, above ``DRAWN``
NOT_SCORED = (1.0, 0.9)  # nats: a side that scored the token is so far from a filler, at so many of its tokens
LONELY = 3  # times as many as of any value beside it: the values of a coarse grid have neighbours

# a bound in place of a log-prob (fillers.cuts)
CUT_TOKENS = 3  # at which it stands, at least
CUT_LEAST = 0.01  # nats from 0, the bound
CUT_APART = 0.3  # nats, or of the bound: so far beyond it the other side is clearly beyond
CUT_ALL = 0.9  # of the tokens where the other side is clearly beyond
CUT_MOST = 0.5  # of the tokens at which it stands

# with the model (substitution.py, consult.py)
LEAST = 0.01  # of sum d^2, below which a cause is not worth a name
CAUSES = 6  # at most
FEWEST_OF_HALF = 4  # units in the half that chooses, and in the half that measures
REPRODUCED = 0.25  # of the squared rounding that a finer format denies
ONE_SIGN = 0.8  # mean sign of d, where a cut support is tried
MUCH = 0.1  # of sum d^2: worth a forward for each layer
DAMAGED = 3.0  # times the declared rounding: below it a gap is no sign of damaged weights
SMALL = 1e-4  # nats: what rounding is at least taken to be
MOST = 0.5  # of sum d^2: the cause of a gap
CLEAR = 0.8  # of sum d^2: more sequences would not change it
SURELY = 1e-6  # probability of samples so low in a whole law
GIVEN_BACK = 0.1  # of the squared error that the declared side leaves of the saved log-probs
OTHER_SIDE = 3.0  # times as much left of the other side's log-probs, where one side's come back


@functools.cache
def of(signature: str) -> SimpleNamespace:
    """A signature's own, by their names in its row."""
    return SimpleNamespace(**facts().faults[signature].bounds)
