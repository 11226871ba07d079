"""What is kept of a version, and when nothing is."""

from __future__ import annotations

import pytest
import torch

from syncstack import ModuleSource, ParamMeta
from syncstack.refit.kept import KeptVersion
from syncstack.refit.resync import ALONE, Resync
from syncstack.settings import Settings


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Linear(3, 2)
        self.two = torch.nn.Linear(3, 2)
        self.two.weight = self.one.weight
        self.scalar = torch.nn.Parameter(torch.tensor(1.5))
        self.view = torch.nn.Parameter(torch.arange(6.0).view(2, 3).t())
        self.register_buffer("empty", torch.empty(0, 4))


def keep(kept: KeptVersion, module: torch.nn.Module, version: int) -> None:
    with kept.keeping(ModuleSource(module), version) as source:
        assert source.metadata() == ModuleSource(module).metadata()
        list(source)


def test_it_has_the_values_of_its_version_and_not_what_came_after() -> None:
    module, kept = Tied(), KeptVersion()
    keep(kept, module, 7)
    before = {name: tensor.clone() for name, tensor in ModuleSource(module)}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    assert kept.version == 7
    assert kept.metadata() == ModuleSource(module).metadata()
    assert kept.aliases() == {"two.weight": "one.weight"}
    found = dict(kept)
    assert found.keys() == before.keys()
    assert all(torch.equal(found[name], before[name]) for name in before)


def test_the_next_version_takes_the_memory_of_the_last_and_follows_another_shape() -> None:
    module, kept = Tied(), KeptVersion()
    keep(kept, module, 1)
    places = {name: tensor.data_ptr() for name, tensor in kept}
    keep(kept, module, 2)
    assert {name: tensor.data_ptr() for name, tensor in kept} == places
    module.scalar = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    keep(kept, module, 3)
    assert ParamMeta(name="scalar", dtype="bfloat16", shape=(2,)) in kept.metadata()
    assert len(kept.metadata()) == len(set(kept.metadata())) == 6


def test_a_version_that_fails_is_not_kept_and_neither_is_the_one_before() -> None:
    module, kept = Tied(), KeptVersion()
    keep(kept, module, 1)
    with pytest.raises(RuntimeError, match="it failed"), kept.keeping(ModuleSource(module), 2) as source:
        next(iter(source))
        raise RuntimeError("it failed")
    assert kept.version is None
    assert not kept.lock.locked()


def test_a_thread_that_still_asks_after_its_version_failed_changes_nothing() -> None:
    module, kept = Tied(), KeptVersion()
    with pytest.raises(RuntimeError, match="it failed"), kept.keeping(ModuleSource(module), 1) as source:
        late = iter(source)
        next(late)
        raise RuntimeError("it failed")
    keep(kept, module, 2)
    before = {name: tensor.clone() for name, tensor in kept}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    assert len(list(late)) == len(before) - 1, "it gets its tensors, whoever it is"
    assert kept.metadata() == ModuleSource(module).metadata()
    assert all(torch.equal(tensor, before[name]) for name, tensor in kept)


def test_nothing_is_kept_while_the_version_before_is_being_sent() -> None:
    module, kept = Tied(), KeptVersion()
    keep(kept, module, 1)
    with kept.lock:
        before = {name: tensor.clone() for name, tensor in kept}
        with torch.no_grad():
            module.scalar.add_(1)
        keep(kept, module, 2)
        assert all(torch.equal(tensor, before[name]) for name, tensor in kept), "it was written under its reader"
    assert kept.version is None


def test_nobody_is_brought_to_a_version_that_is_not_the_last() -> None:
    resync = Resync(KeptVersion(), Settings.load(), lambda *_: pytest.fail("there is nothing to bring"))
    assert resync("unix:/nowhere") is None


@pytest.mark.parametrize(
    ("transport", "alone"),
    [("auto", ALONE), ("collective", "stream"), ("collective, host_fd", " host_fd"), ("stream", "stream")],
)
def test_the_way_to_one_engine_needs_no_group(transport: str, alone: str) -> None:
    resync = Resync(KeptVersion(), Settings.load(transport=transport, min_engines=1), lambda *_: None)
    assert resync._settings.transport == alone
    assert resync._settings.min_engines == 0
