"""Names of policies mean the same for a server and for a replay."""

import pytest

from keepwarm.compose.policies import EVICTION_NAMES, PolicyNames, eviction_family, worker_family
from keepwarm.compose.replay_bundles import BUNDLES, names_in
from keepwarm.compose.replay_cache import CACHE_POLICIES, CLAIRVOYANT
from keepwarm.core.errors import ConfigurationError
from keepwarm.store.eviction.costs import PrefillCost
from keepwarm.store.eviction.yielding import YieldingFamily

COST = PrefillCost(block_size=16)


@pytest.mark.parametrize("name", EVICTION_NAMES)
def test_a_family_has_its_name(name: str) -> None:
    assert eviction_family(name, COST).name.partition("@")[0] == name


def test_replays_know_every_family_once_and_lru_by_its_short_name() -> None:
    assert eviction_family("lru", COST).name == eviction_family("leaf-lru", COST).name
    assert PolicyNames(eviction="lru").eviction == "lru"
    online = [name for name in CACHE_POLICIES if name not in (*CLAIRVOYANT, "fifo")]
    assert sorted(eviction_family(name, COST).name for name in online) == sorted(
        eviction_family(name, COST).name for name in EVICTION_NAMES
    )


@pytest.mark.parametrize("kind", ["eviction", "routing", "admission"])
def test_an_unknown_name_is_refused_with_those_that_there_are(kind: str) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"no {kind} policy is called 'none-such'.*keepwarm|working-set"
    ):
        PolicyNames(**{kind: "none-such"})


def test_bundles_are_admission_routing_and_eviction_in_this_order() -> None:
    assert names_in("working-set+keepwarm+keepwarm") == BUNDLES["keepwarm"]
    assert BUNDLES["saga"] == PolicyNames(admission="saga-afs", routing="saga-affinity", eviction="saga")


@pytest.mark.parametrize("admission", ["working-set", "thunderagent", "fcfs"])
def test_eviction_hears_of_pauses_where_admission_pauses(admission: str) -> None:
    family = worker_family(PolicyNames(admission=admission), COST)
    assert isinstance(family, YieldingFamily) == (admission != "fcfs")
