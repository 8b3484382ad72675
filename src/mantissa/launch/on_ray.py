"""A run on the machines of a Ray cluster: Mantissa's own training, in processes that Ray places.

Ray finds the machines (a placement group of one bundle for each, every one on another machine), and carries an actor
to each. The actor is a ``Node`` (``mantissa.launch.node``): it starts the command ``mantissa train`` there with the
environment that ``torchrun`` would give, and watches it. So what trains is what trains everywhere else, and a run goes
on from its folder on another number of machines, or without Ray. Nothing is retried here: one failure ends all, and
one line says whose it was.

Three things are watched, each by itself, for Ray takes up to minutes to give one up: that every node answers within
``PATIENCE_S`` (a node in turn ends its ranks where it is not asked for as long), that the head takes connections, and
the ranks.
"""

from __future__ import annotations

import os
import secrets
import shlex
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mantissa.base.errors import MantissaError, RankError, pip_install
from mantissa.base.files import disk_errors
from mantissa.launch.node import Failure, Node, Share
from mantissa.rl import load_recipe, resumed_config
from mantissa.runs.directory import default_path

PATIENCE_S = 30.0  # without a word from a node, or from the head, after which it is given up
_BEAT_S = 1.0
_PLACE_S = 60.0  # that machines which are there may take to be free
_BEGIN_S = 120.0  # for an actor's process to come up, with the package brought to it
_LAST_WORDS_S = 12.0  # that nodes may take to end their ranks and say how they ended
GONE = "is lost: the machine, or Ray's process there, is gone"
_LOST = 3  # exit code of a rank that lost another


@dataclass(frozen=True)
class Plan:
    """What is run where. ``arguments``: of the command ``mantissa`` on each node, ``{folder}`` being where ``files``
    lie; ``shared``: a file that all nodes must see, with its text."""

    arguments: tuple[str, ...]
    files: Mapping[str, str]
    shared: tuple[Path, str]
    run_dir: Path
    nodes: int
    processes: int  # of each node
    device: str  # as the recipe has it: auto is a GPU for each process where the cluster has any

    @property
    def world(self) -> int:
        return self.nodes * self.processes

    def lines(self, addresses: Sequence[str]) -> list[str]:
        """Which processes are where."""
        firsts = [index * self.processes for index in range(self.nodes)]
        ranks = [str(a) if self.processes == 1 else f"{a}-{a + self.processes - 1}" for a in firsts]
        return [f"process {rank} on node {address}" for rank, address in zip(ranks, addresses, strict=True)]

    def dry_run(self) -> str:
        """What would be run, to be read."""
        each = f"{self.processes} process{'es' if self.processes > 1 else ''}"
        machines = f"{self.nodes} machine{'s' if self.nodes > 1 else ''}"
        lines = [f"on {machines} of a Ray cluster, {each} on each, with torchrun's environment:"]
        lines += [f"  mantissa {shlex.join(self.arguments)}", f"run {self.run_dir} (a folder that all must see)"]
        for name, text in self.files.items():
            lines += ["", f"{{folder}}/{name}:", *(f"  {line}" for line in text.splitlines())]
        return "\n".join(lines)


@contextmanager
def planned(
    recipe: Path | None, overrides: Sequence[str], resume: Path | None, nodes: int, *, keep: bool
) -> Iterator[Plan]:
    """The plan of a recipe's run, or of a run's continuation, on so many machines.

    The recipe travels as it was resolved here, so that its file need not be seen by all. ``keep``: a file by which
    nodes show that they see the run's folder lies beside it meanwhile; a run that is continued has its own.
    """
    given = [] if recipe is None else [str(recipe), *overrides]
    if resume is not None:
        config, run_dir = resumed_config(resume, given), resume.absolute()
    elif recipe is None:
        raise MantissaError("expected a recipe, such as recipes/demo.yaml, or --resume RUN")
    else:
        config = load_recipe(recipe, overrides, nproc=nodes)
        run_dir = Path(config.run_dir or default_path(config.name)).absolute()
    world = config.nproc
    if world % nodes:
        raise MantissaError(f"nproc={world}: --nodes {nodes} cannot share them evenly; set nproc to a multiple of it")
    about: dict[str, Any] = {"nodes": nodes, "processes": world // nodes, "device": config.device, "run_dir": run_dir}
    if resume is not None:
        seen = run_dir / "config.yaml"
        yield Plan(("train", "--resume", str(run_dir), *given), {}, (seen, seen.read_text()), **about)
        return
    values = {**config.model_dump(mode="json"), "run_dir": str(run_dir)}
    files = {"recipe.yaml": yaml.safe_dump(values, sort_keys=False, allow_unicode=True)}
    seen, mark = run_dir.parent / f".{run_dir.name}-{secrets.token_hex(4)}.seen", secrets.token_hex(16)
    plan = Plan(("train", "{folder}/recipe.yaml"), files, (seen, mark), **about)
    if not keep:
        yield plan
        return
    if run_dir.is_dir() and any(run_dir.iterdir()):
        raise MantissaError(f"{run_dir} already holds something: continue it with --resume, or choose another run_dir")
    with disk_errors(seen.parent):
        seen.parent.mkdir(parents=True, exist_ok=True)
        seen.write_text(mark)
    try:
        yield plan
    finally:
        seen.unlink(missing_ok=True)


@dataclass
class Placed:
    """The nodes of a run, in the order of their ranks."""

    actors: list[Any]
    addresses: list[str]
    head: tuple[str, int]


@dataclass
class Outcome:
    """How the nodes' ranks ended. ``lost``: what is known of machines that are gone, by their place."""

    failures: dict[int, Failure] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)


def listens(nodes: int, local: bool) -> list[str]:
    """What would listen beyond the loopback interface, and who must be trusted for it; empty where nothing would."""
    lines = []
    if local:
        lines.append(
            "a Ray of this launch's own listens on every interface of this machine, on ports that it chooses; it asks "
            "for a token that only its own processes have (Ray 2.52 and newer; an older one asks nothing)"
        )
    if nodes > 1:
        lines.append(
            "process 0 listens on every interface of its node, on a port that it chooses (torch's store, where the "
            "processes find each other), and every process on the interface that leads there (gloo; nccl on GPUs)"
        )
        lines.append(
            "none of these asks for a password, and who reaches one while the run starts can run programs as you: the "
            "network between the nodes must be closed to everybody whom you do not trust"
        )
    return lines


@contextmanager
def cluster(address: str | None, local: bool) -> Iterator[tuple[str, int]]:
    """Connected to the cluster at ``address``, or to a Ray of its own; gives the head's host and port.

    What Ray prints meanwhile (its word on every death, with its log) is dropped with what else goes to ``sys.stdout``:
    print to the stream that it was before.

    Raises ``MantissaError`` where Ray is not installed, nobody answers, or Ray refuses the connection.
    """
    if local:
        _guard_with_token()  # before Ray is imported, which is when it looks
    try:
        import ray
    except ImportError:
        raise MantissaError(f"--on ray needs Ray, which is not installed: {pip_install('ray')}") from None
    package = Path(__file__).parents[1]
    options: dict[str, Any] = {"runtime_env": {"py_modules": [str(package)]}, "log_to_driver": False}
    options |= {"logging_level": "CRITICAL", "include_dashboard": False if local else None}
    where = "local" if local else _address(address)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        try:
            ray.init(address=where, **options)
        except Exception as error:  # noqa: BLE001 - Ray raises errors of many kinds, and asserts
            raise MantissaError(_refused(where, error)) from None
        try:
            host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
            yield host.strip("[]"), int(port)
        finally:
            with suppress(Exception):
                ray.shutdown()


def _guard_with_token() -> None:
    """Have a Ray that is started here ask everybody for a secret, unless the user has set how.

    The variables stay for this process: it reads them once, and a second Ray that it starts must have the same secret.
    """
    if not any(name.startswith("RAY_AUTH_") for name in os.environ):
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def _address(address: str | None) -> str:
    """The head's address as Ray takes it, once somebody answers there: Ray itself would try for minutes."""
    address = address or os.environ.get("RAY_ADDRESS")
    expected = "expected the head's HOST:6379, or auto for the Ray that runs on this machine"
    if address is None:
        raise MantissaError(
            f"--on ray without a cluster: {expected}, as --address or in RAY_ADDRESS; --local starts a Ray of its own "
            "on this machine"
        )
    if "://" in address:
        raise MantissaError(
            f"--address {address}: {expected}: this command runs on a node of the cluster; to start it from elsewhere: "
            f"ray job submit --address {address.replace('ray://', 'http://')} -- mantissa launch RECIPE --on ray"
        )
    if address == "auto":
        return address
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise MantissaError(f"--address {address}: {expected}")
    if not _answers((host.strip("[]"), int(port)), 5.0):
        raise MantissaError(f"no Ray head answers at {address}: is it running, and is that its address?")
    return address


def _refused(where: str, error: Exception) -> str:
    text = _line(error)
    if "Could not find any running Ray" in text:
        return (
            "--address auto: no Ray runs on this machine: start one (ray start), give --address HOST:6379, or --local"
        )
    if "token" in text.lower() and "auth" in text.lower():
        return f"the Ray at {where} asks for a token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN as its nodes have them"
    return f"Ray at {where}: {text}"


@contextmanager
def placed(plan: Plan, head: tuple[str, int]) -> Iterator[Placed]:
    """A ``Node`` on each of so many machines, all of them alike, for as long as the run takes.

    Raises ``MantissaError`` where there are too few machines, they are busy, differ in their versions, or do not see
    the shared folder.
    """
    import ray
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    needed = _bundle(plan, ray.nodes())
    group = placement_group([needed] * plan.nodes, strategy="STRICT_SPREAD")
    try:
        begin = time.monotonic()
        while not group.wait(5.0):
            _bundle(plan, ray.nodes())  # a machine may only now be known to be gone
            if time.monotonic() - begin > _PLACE_S:
                raise MantissaError(
                    f"the cluster has the machines, but for {_PLACE_S:g} s not {plan.nodes} with {_said(needed)} free: "
                    "other jobs have them; ray status shows which"
                )
        here = [PlacementGroupSchedulingStrategy(group, index) for index in range(plan.nodes)]
        remote: Any = ray.remote(max_concurrency=4, max_restarts=0)(Node)
        resources = {"num_cpus": needed["CPU"], "num_gpus": needed.get("GPU", 0)}
        actors = [remote.options(scheduling_strategy=each, **resources).remote() for each in here]
        abouts = _asked(ray, [actor.about.remote(str(plan.shared[0]), os.getcwd()) for actor in actors])
        chosen = placement_group_table(group)["bundles_to_node_id"]
        of = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes()}
        addresses = [of[chosen[index]] for index in range(plan.nodes)]
        _check_alike(dict(zip(addresses, abouts, strict=True)), plan)
        yield Placed(actors, addresses, head)
    finally:
        with suppress(Exception):
            if _answers(head, 2.0):  # Ray would wait for one that is gone
                remove_placement_group(group)


def _bundle(plan: Plan, nodes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What a node must have for its processes, of which the cluster has enough."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    needed = {"CPU": float(plan.processes)}
    if plan.device == "cuda" or (plan.device == "auto" and any(node.get("GPU") for node in alive)):
        needed["GPU"] = float(plan.processes)
    able = sum(all(node.get(kind, 0) >= amount for kind, amount in needed.items()) for node in alive)
    if able < plan.nodes:
        raise MantissaError(
            f"--nodes {plan.nodes}, each with {_said(needed)}, but {able} of this cluster's {len(alive)} "
            f"{'machine has' if len(alive) == 1 else 'machines have'} as much; lower --nodes or nproc, or start more "
            "nodes"
        )
    return needed


def _said(bundle: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {kind}{'s' if amount != 1 else ''}" for kind, amount in bundle.items())


def _asked(ray: Any, references: list[Any]) -> list[dict[str, Any]]:
    try:
        return list(ray.get(references, timeout=_BEGIN_S))
    except ray.exceptions.GetTimeoutError:
        raise MantissaError(
            f"a node did not start within {_BEGIN_S:g} s: look into /tmp/ray/session_latest/logs there"
        ) from None
    except ray.exceptions.RayError as error:
        raise MantissaError(f"a node did not start: {_line(error)}") from None


def _check_alike(abouts: Mapping[str, Mapping[str, Any]], plan: Plan) -> None:
    """``abouts``: what each node said of itself, by its address."""
    path, text = plan.shared
    first, versions = next((address, about["versions"]) for address, about in abouts.items())
    for address, about in abouts.items():
        if about["versions"] != versions:
            raise MantissaError(
                f"node {address} has {about['versions']}, node {first} has {versions}: install the same versions, or "
                "numbers will differ"
            )
        if about["found"] != text:
            raise MantissaError(
                f"node {address} does not see {path.parent}: the run's folder must be one that all nodes share, such "
                "as a network file system; say run_dir=FOLDER"
            )
        if not about["cwd"]:
            raise MantissaError(
                f"node {address} has no folder {os.getcwd()}, in which this command was started and from which the "
                "recipe's relative paths count: start it in a shared folder"
            )


def run(plan: Plan, nodes: Placed, show: Callable[[str], None]) -> Outcome:
    """Train to the end, or to the first failure. Raises ``RankError`` where the head is gone.

    On Ctrl-C, as on every other exception, the nodes have ended their ranks when this returns.
    """
    import ray

    said = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(said) if said.isdigit() and int(said) > 0 else None
    master = None
    if plan.nodes > 1:
        first = nodes.addresses[0]
        master = (first, ray.get(nodes.actors[0].free_port.remote(first), timeout=PATIENCE_S))
    ended: dict[Any, int] = {}
    for index, actor in enumerate(nodes.actors):
        share = Share(
            first=index * plan.processes,
            count=plan.processes,
            world=plan.world,
            master=master,
            arguments=plan.arguments,
            files=plan.files,
            cwd=os.getcwd(),
            threads=threads,
            patience_s=PATIENCE_S,
        )
        ended[actor.run.remote(share)] = index
    watch = _Watch(plan, nodes, ended, show)
    try:
        watch.until_first_failure()
    finally:
        watch.end()
    if watch.outcome.lost and not _answers(nodes.head, 2.0):
        raise RankError(_headless(nodes.head))
    return watch.outcome


class _Watch:
    """The nodes of one run, as their launcher sees them."""

    def __init__(self, plan: Plan, nodes: Placed, ended: dict[Any, int], show: Callable[[str], None]) -> None:
        self.plan, self.nodes, self.show = plan, nodes, show
        self.ended = ended  # what will say how a node's ranks ended, by reference
        self.outcome = Outcome()
        now = time.monotonic()
        self.answered = dict.fromkeys(range(plan.nodes), now)
        self.head_answered = now
        self.beats: dict[Any, int] = {}

    def until_first_failure(self) -> None:
        """Until every node's ranks have ended well, or one failed, or a node or the head is lost."""
        while self.ended and not self._failed():
            self.look(_BEAT_S)
            self._look_at_head()

    def end(self) -> None:
        """Have all ranks ended, hear how, and show what they printed last."""
        if self.ended:  # those that lost another by themselves say so within moments, and who was killed is known
            self._until(time.monotonic() + 2.0)
        for index in self.ended.values():
            self.nodes.actors[index].stop.remote()
        self._until(time.monotonic() + _LAST_WORDS_S)
        codes = {failure.exitcode for failure in self.outcome.failures.values()}
        if codes and codes <= {_LOST, -15}:  # whose connection was lost: a node that is gone answers to nothing
            self._until(time.monotonic() + PATIENCE_S)
        for index in self.answered.keys() - self.outcome.lost.keys() - set(self.ended.values()):
            self._show_rest(index)

    def look(self, seconds: float) -> None:
        """Hear what nodes say for so long, and give up those that have not answered for too long."""
        import ray

        for index in set(self.ended.values()) - set(self.beats.values()):
            self.beats[self.nodes.actors[index].beat.remote()] = index
        until = time.monotonic() + seconds
        while self.ended and (left := until - time.monotonic()) > 0:
            heard, _ = ray.wait([*self.ended, *self.beats], num_returns=1, timeout=left)
            for reference in heard:
                self._hear(reference)
            if not heard or any(reference in self.ended for reference in heard) or self._failed():
                break
        for index in set(self.ended.values()):
            if time.monotonic() - self.answered[index] > PATIENCE_S:
                self._lose(index, f"has not answered for {PATIENCE_S:g} s")

    def _hear(self, reference: Any) -> None:
        import ray

        index = self.beats.pop(reference) if reference in self.beats else self.ended[reference]
        try:
            said = ray.get(reference, timeout=1.0)
        except ray.exceptions.RayError:
            if index in self.ended.values():
                self._lose(index, GONE)
            return
        self.answered[index] = time.monotonic()
        if isinstance(said, str):
            self.show(said)
        else:
            del self.ended[reference]
            self.outcome.failures |= said

    def _lose(self, index: int, why: str) -> None:
        self.outcome.lost[index] = why
        self.ended = {reference: place for reference, place in self.ended.items() if place != index}
        self.beats = {reference: place for reference, place in self.beats.items() if place != index}

    def _failed(self) -> bool:
        return bool(self.outcome.failures or self.outcome.lost)

    def _until(self, end: float) -> None:
        while self.ended and time.monotonic() < end:
            self.look(min(_BEAT_S, end - time.monotonic()))

    def _look_at_head(self) -> None:
        if _answers(self.nodes.head, 2.0):
            self.head_answered = time.monotonic()
        elif time.monotonic() - self.head_answered > PATIENCE_S / 3:
            raise RankError(_headless(self.nodes.head))

    def _show_rest(self, index: int) -> None:
        import ray

        with suppress(ray.exceptions.RayError):
            self.show(ray.get(self.nodes.actors[index].rest.remote(), timeout=_LAST_WORDS_S))


def _headless(head: tuple[str, int]) -> str:
    return f"the Ray head at {head[0]}:{head[1]} is gone; the processes were stopped"


def _answers(address: tuple[str, int], seconds: float) -> bool:
    """Whether somebody takes connections there."""
    try:
        with socket.create_connection(address, seconds):
            return True
    except OSError:
        return False


def _line(error: object) -> str:
    """What an error of Ray says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:300]
