"""Before anything imports torch or Triton: threads that wait sleep, and without a GPU Triton's kernels are interpreted.

Test workers share the cores. A thread pool that spins while it waits takes the core from
the one it waits for: two processes of two threads each took 110 s on two cores for what
they do in 3 s when they sleep (docs/LOG.md).
"""
# ruff: noqa: E402

import atexit
import contextlib
import gc
import importlib
import os
import sys
from pathlib import Path

ended = []  # the session, once its exit status is known


@atexit.register  # before what is imported below has registered anything: the first is called last
def _end_at_once():
    """Taking apart all that was imported would take 6 s of a core; what is printed is written first."""
    if ended and ("PYTEST_XDIST_WORKER" in os.environ or is_program("pytest")):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended[0].exitstatus)


os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # or torch compiles 9 s of programs to see what the compiler can

import pytest
import torch

from rondel.models.native_library import chosen_library
from rondel.system import process_memory
from rondel.system.interpreter import is_program

process_memory.LEAST_RESIDENT = 1 << 40  # the heap of a thousand tests is not searched after every step of one


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.register_assert_rewrite("kits")

from kits import checked_once

checked_once.check_models_once()


def pytest_sessionfinish(session):
    ended.append(session)


def _import_share(config):
    """Imports this worker's share of all test modules: what it compiles and writes, the other workers read when they
    collect the same modules. Side by side and in one order, each would compile each of them.
    """
    worker = getattr(config, "workerinput", None)
    if worker is None or config.args_source != config.ArgsSource.TESTPATHS or sys.dont_write_bytecode:
        return
    modules = sorted(Path(__file__).parent.glob("*/test_*.py"))
    for module in modules[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
        if str(module.parent) not in sys.path:
            sys.path.insert(0, str(module.parent))
        with contextlib.suppress(Exception, pytest.skip.Exception):  # said when it is collected
            importlib.import_module(module.stem)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config):
    """The workers, and the processes that their tests start, are forked from one clean server; the fast tests need none."""
    if config.option.markexpr != "not slow":
        from kits.runs import start_clean_server

        forks = sys.platform == "linux" and not torch.cuda.is_available()  # what talks to a GPU must not be forked
        whole = config.args_source == config.ArgsSource.TESTPATHS
        config.clean_server = start_clean_server(*(["kits.preloaded_by_tests"] if forks and whole else []))
        if forks:
            from kits.forked_workers import fork_workers

            fork_workers()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    if hasattr(node.config, "clean_server"):
        node.workerinput["clean_server"] = node.config.clean_server


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """What is imported and collected stays until the end: no garbage collection looks through it, now or later."""
    gc.disable()
    try:
        _import_share(session.config)
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        atexit.register(gc.unfreeze)  # not before: pytest collects five times when it ends
        gc.enable()


def pytest_configure(config):
    """Loops for this CPU are compiled, once a machine, before workers that would wait for it have deadlines."""
    from kits import sweeps

    sweeps.left_out = "sweep" not in config.option.markexpr
    if not hasattr(config, "workerinput"):
        chosen_library()
    elif address := config.workerinput.get("clean_server"):
        from kits.runs import use_clean_server

        use_clean_server(address)


def pytest_collection_modifyitems(config, items):
    """What another case proves on the same path runs by `make sweeps` alone."""
    if "sweep" in config.option.markexpr:
        return
    left = [item for item in items if item.get_closest_marker("sweep")]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if not item.get_closest_marker("sweep")]


@pytest.fixture(autouse=True, scope="module")
def _freed_memory():
    """Once a module instead of once a step: what its tests left free goes back."""
    yield
    if (library := process_memory._glibc()) is not None:
        library.malloc_trim(0)


@pytest.fixture(autouse=True)
def _import_path(request):
    """The search path as it was: a run adds the folder of its recipe, which every later import and worker would search.
    A loaded model is checked once (kits/checked_once.py), but where a test replaces something.
    """
    before, checked_once.enabled = sys.path[:], "monkeypatch" not in request.fixturenames
    yield
    sys.path[:] = before


@pytest.fixture
def cluster(tmp_path):
    """Workers in processes of their own; two seconds without a sign of life are too many."""
    from rondel.runtime.cluster.process import ProcessCluster

    made = ProcessCluster(tmp_path / "logs", patience=2.0)
    yield made
    made.close()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """`ranks(Mesh(tp=2))`: trainers in processes of their own, the same processes for every mesh of a module."""
    from kits.ranks import meshes

    with meshes(tmp_path_factory.mktemp("ranks")) as of:
        yield of


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """A folder on the import path with a user's module `theirs`, whose reward runs the answer as code."""
    from kits.rewards import THEIRS

    (tmp_path / "theirs.py").write_text(THEIRS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path
