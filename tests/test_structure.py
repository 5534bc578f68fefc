"""The structure of the code: which way imports point, how large files are. Fails when it decays.

Imports are read from the source, so those inside functions and under TYPE_CHECKING count like all
others: a module that must hide an import to be loaded at all is in the wrong place.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from quire.models.families import FAMILIES
from scripts.statements import num_statements

PACKAGE = Path(__file__).parents[1] / "quire"

LAYERS = (
    (
        "errors",
        "config",
        "block_groups",
        "field_checks",
        "sampling_params",
        "sampling_defaults",
        "outputs",
        "step",
        "process",
    ),
    ("kernels",),
    ("backends",),
    ("checkpoints",),
    ("models",),
    ("sampling",),
    ("constrain",),
    ("runner",),
    ("engine",),
    ("speculate",),
    ("observe",),
    ("frontend",),
    ("load",),
    ("parallel",),
    ("assemble", "engine_control", "llm", "__init__"),
    ("train",),
    ("tools",),
    ("server",),
    ("cluster",),
    ("tools.bench.server_costs",),  # starts servers, and their parts
    ("cli", "__main__"),
)
"""The order of folders and top-level files: imports point to the same line or to one above it. A
folder in another one may have a line of its own.
"""

MAX_STATEMENTS = 280

BACKEND_NAMES = ("reference", "cpu", "triton")
KNOWS_BACKENDS = "backends/select.py"

MAY_SAY_CUDA = (
    KNOWS_BACKENDS,  # the table of devices
    "backends/triton/",  # the device itself, and kernels for it
    "backends/cuda/",  # others, in CUDA C++
    "tools/bench/",  # measures what only such a device has
    # compares what a user typed, in a process that must not import torch
    "server/link/replicas/shares.py",
)
"""Files, and folders of them, in which a line of code may name the device that torch calls cuda."""
CUDA_OPTIONS = ("cuda_graphs",)
"""Names that users write in their programs and settings: they stay, whatever device computes."""


def _sources() -> dict[str, Path]:
    """Every module's dotted name (a package's is its folder's) and file."""
    files = sorted(PACKAGE.rglob("*.py"))
    names = (file.relative_to(PACKAGE.parent).with_suffix("").parts for file in files)
    return {
        ".".join(name).removesuffix(".__init__"): file
        for name, file in zip(names, files, strict=True)
    }


SOURCES = _sources()


@cache  # when a test asks, not when tests are collected
def _nodes(name: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(SOURCES[name].read_text())))


def _imported(name: str) -> Iterator[str]:
    """The full names of what a module imports, wherever in it the import stands."""
    package = name if SOURCES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in _nodes(name):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = (
                package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            )
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _modules_imported(name: str) -> set[str]:
    """The modules of Quire that a module imports; of a name inside one, the module.

    The package's version and place are free to all: `quire/__init__.py` brings nothing else until
    it is asked.
    """
    wanted = (full for full in _imported(name) if full not in ("quire", "quire.__version__"))
    found = (full if full in SOURCES else full.rpartition(".")[0] for full in wanted)
    return {module for module in found if module in SOURCES and module != name}


@cache
def _graph() -> dict[str, set[str]]:
    return {name: _modules_imported(name) for name in SOURCES}


def _layer(name: str) -> int:
    """Where in the order a module stands; a new folder or top-level file must be given its place
    there.
    """
    inside = name.partition(".")[2] or "__init__"
    places = {
        one: number
        for number, layer in enumerate(LAYERS)
        for one in layer
        if f"{inside}.".startswith(f"{one}.")
    }
    assert places, f"{name} has no place in LAYERS"
    return places[max(places, key=len)]


def test_imports_point_down() -> None:
    upwards = sorted(
        f"{name} imports {other}"
        for name, others in _graph().items()
        for other in others
        if _layer(other) > _layer(name)
    )
    assert not upwards, "\n".join(["imports that point up:", *upwards])


def test_no_circles() -> None:
    graph = {name: set(others) for name, others in _graph().items()}
    circles = []
    while True:
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            circle = error.args[1][::-1]  # graphlib lists what is imported first
            circles.append(" -> ".join(circle))
            graph[circle[0]].discard(circle[1])
        else:
            break
    assert not circles, "\n".join(["import circles:", *circles])


SERVER_ROOMS = (("guard", "stored"), ("link",), ("calls",), ("api",), ("batches",))
"""The same order inside the server. What stands beside its rooms joins them."""


def test_the_server_s_rooms_import_downwards() -> None:
    places = {room: place for place, rooms in enumerate(SERVER_ROOMS) for room in rooms}
    rooms = {
        name: name.split(".")[2]
        for name in SOURCES
        if name.startswith("quire.server.") and name.split(".")[2] in places
    }
    upwards = sorted(
        f"{name} imports {other}"
        for name, room in rooms.items()
        for other in _graph()[name]
        if other in rooms and places[rooms[other]] > places[room]
    )
    assert set(rooms.values()) == set(places)
    assert not upwards, "\n".join(["imports that point up:", *upwards])


def test_engine_imports_no_torch() -> None:
    """Not even for types. (That nothing the engine imports loads torch, tests/engine/test_core.py
    sees by doing it.)
    """
    names = [name for name in SOURCES if name.split(".")[1:2] == ["engine"]]
    users = [
        name for name in names if any(full.split(".")[0] == "torch" for full in _imported(name))
    ]
    assert names
    assert not users


def test_no_file_is_long() -> None:
    """Counted in statements, so that lines are broken where they read best."""
    sizes = {
        str(file.relative_to(PACKAGE)): num_statements(_nodes(name))
        for name, file in SOURCES.items()
    }
    long = [f"{name}: {size}" for name, size in sizes.items() if size > MAX_STATEMENTS]
    assert not long, "\n".join([f"files of more than {MAX_STATEMENTS} statements:", *long])


def test_only_select_knows_backends_by_name() -> None:
    """What a backend can do is asked of the backend: another one may be able to do it too."""
    found = []
    for name, file in SOURCES.items():
        where = file.relative_to(PACKAGE).as_posix()
        if where == KNOWS_BACKENDS:
            continue
        found += [f"{where}:{node.lineno}" for node in _nodes(name) if _tests_backend_name(node)]
    assert not found, "\n".join(
        [f"a kernel backend's name is tested outside {KNOWS_BACKENDS}:", *found]
    )


def _tests_backend_name(node: ast.AST) -> bool:
    """`kernels.name == "triton"`, `kernels.name in (…)`, `match kernels.name`, `isinstance(…,
    TritonKernels)`.
    """
    if isinstance(node, ast.Match):
        return _is_backend_name(node.subject)
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "isinstance"
    ):
        return re.search(r"\w+Kernels\b", ast.unparse(node.args[1])) is not None
    if not isinstance(node, ast.Compare):
        return False
    sides = [node.left, *node.comparators]
    literals = {
        part.value for side in sides for part in ast.walk(side) if isinstance(part, ast.Constant)
    }
    return any(map(_is_backend_name, sides)) and not literals.isdisjoint(BACKEND_NAMES)


def _is_backend_name(node: ast.expr) -> bool:
    """`….name` of anything, or a variable whose name says it holds a backend's name."""
    text = ast.unparse(node)
    return (
        text.endswith(".name")
        or re.fullmatch(r"(\w+\.)*(kernels|backend)(_name)?", text) is not None
    )


def test_only_a_device_says_cuda() -> None:
    """Everybody else asks the `Device`, so that another one is a device and its kernels. Text for
    people (help, messages, docstrings) may say what a user would type.
    """
    found = []
    for name, file in SOURCES.items():
        where = file.relative_to(PACKAGE).as_posix()
        if not where.startswith(MAY_SAY_CUDA):
            found += [f"{where}:{line}" for node in _nodes(name) for line in _lines_with_cuda(node)]
    assert not found, "\n".join(["lines that name a kind of device instead of asking it:", *found])


def test_the_check_for_cuda_sees_what_it_is_for() -> None:
    lines = (
        'device.type == "cuda"', "torch.cuda.synchronize()", "tensor.is_cuda", 'torch.device("cuda", 1)',
        'f"cuda:{rank}"', "import torch.cuda", "from torch import cuda", "is_cuda = True", "def f(on_cuda): ...",
        "f(on_cuda=1)", "CudaDevice(place)",
    )  # fmt: skip
    for line in lines:
        assert [*itertools.chain(*map(_lines_with_cuda, ast.walk(ast.parse(line))))], line
    for line in (
        "config.cuda_graphs",
        "f(cuda_graphs=False)",
        '"""cpu or cuda."""',
        'fail("must be cpu or cuda")',
    ):
        assert not [*itertools.chain(*map(_lines_with_cuda, ast.walk(ast.parse(line))))], line


def _lines_with_cuda(node: ast.AST) -> Iterator[int]:
    """Where a name has cuda in it, or a string is the name of such a device and nothing else."""
    names = [getattr(node, field, None) for field in ("id", "attr", "arg", "name", "module")]
    found = [
        name
        for name in names
        if isinstance(name, str) and "cuda" in name.lower() and name not in CUDA_OPTIONS
    ]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        found += [node.value] if re.fullmatch(r"cuda(:\d*)?", node.value) else []
    if found:
        yield getattr(node, "lineno", 0)


def test_nothing_below_the_table_of_families_asks_for_a_familys_name() -> None:
    """What differs between families is data: a string that is one's name or architecture is a
    branch on it.
    """
    tables = (
        "families",
        "further_families",
        "classic_families",
        "gemma4_family",
        "kimi_family",
        "latent_families",
        "llama4_family",
        "defaults",
    )
    names = {
        name for family in FAMILIES for name in (family.name, *family.architectures, family.gguf)
    }
    below = [
        name
        for name in SOURCES
        if name.split(".")[1:2] in (["models"], ["kernels"], ["backends"], ["runner"], ["engine"])
    ]
    assert len(below) > 40
    found = [
        f"{name}, line {node.lineno}: {node.value!r}"
        for name in below
        if name
        not in (*(f"quire.models.{table}" for table in tables), "quire.checkpoints.download")
        for node in _nodes(name)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names
    ]
    assert not found, "\n".join(found)


PRODUCTS = (
    "linear",
    "linear_pair",
    "linear_gated",
    "linear_heads",
    "latent_queries_",
    "moe",
    "routed_experts",
    "embedding",
)
"""The methods of `Kernels` that take a weight."""
DOOR = "quire.models.linear"
BEHIND_THE_DOOR = (
    "quire.kernels",
    "quire.backends",
    "quire.parallel.kernels",
    "quire.train.routing",
)
"""Backends, which compute the products."""
WITH_MATRICES_OF_THEIR_OWN = ("quire.tools.plan.devices", "quire.tools.bench")
"""Measure kernels, with no model."""


def test_every_product_with_a_models_weight_goes_through_the_door() -> None:
    """Else what is added there for each row (adapters) would be missing from it."""
    free = (DOOR, *BEHIND_THE_DOOR, *WITH_MATRICES_OF_THEIR_OWN)
    found = [
        f"{name}, line {line}"
        for name in SOURCES
        if not any(name == one or name.startswith(f"{one}.") for one in free)
        for line in _products_in(_nodes(name))
    ]
    assert not found, "\n".join([f"products that go past {DOOR}:", *found])


def _products_in(nodes: Iterable[ast.AST]) -> list[int]:
    """Lines on which a product of kernels is called, or handed on."""
    return [
        node.lineno
        for node in nodes
        if isinstance(node, ast.Attribute) and node.attr in PRODUCTS
        if re.search(r"(^|[._])kernels$", ast.unparse(node.value))
    ]


def test_a_product_past_the_door_is_found() -> None:
    past = (
        "kernels.linear(x, w)",
        "batch.kernels.linear_gated(x, w, None, a)",
        "f = self._kernels.moe",
    )
    through = (
        "self.up(batch, x)",
        "self.up.gated(batch, x, a)",
        "kernels.rms_norm(x, w, 1e-5)",
        "self.embedding(rows, x)",
    )
    assert all(_products_in(ast.walk(ast.parse(text))) == [1] for text in past)
    assert not any(_products_in(ast.walk(ast.parse(text))) for text in through)
    assert len(_products_in(_nodes(DOOR))) >= len(PRODUCTS)
