"""Owns the names of the admission policies.

Never decides. Called by `compose` and `sim.cluster`.
"""

from collections.abc import Callable, Mapping

from keepwarm.workflow.admission.autellix import Atlas, Plas
from keepwarm.workflow.admission.continuum import ContinuumOrder
from keepwarm.workflow.admission.in_order import ByPriority, Fcfs
from keepwarm.workflow.admission.parrot import ParrotGang
from keepwarm.workflow.admission.pie import PieRent
from keepwarm.workflow.admission.policy import AdmissionPolicy
from keepwarm.workflow.admission.saga import AgentFairShare
from keepwarm.workflow.admission.seated import ReturnProbability
from keepwarm.workflow.admission.thunderagent import ThunderAgent
from keepwarm.workflow.admission.working_set import WorkingSet
from keepwarm.workflow.admission.working_set_settings import WorkingSetSettings

_PUBLISHED: Mapping[str, Callable[[], AdmissionPolicy]] = {
    "fcfs": Fcfs,
    "priority": ByPriority,
    "plas": Plas,
    "atlas": Atlas,
    "parrot": ParrotGang,
    "continuum": ContinuumOrder,
    "thunderagent": ThunderAgent,
    "saga-afs": AgentFairShare,
    "pie": PieRent,
}

NAMES = (*_PUBLISHED, "working-set")


def admission_of(
    name: str,
    *,
    working_set: WorkingSetSettings | None = None,
    return_probability: ReturnProbability | None = None,
) -> AdmissionPolicy:
    """A fresh policy, with published constants; the two arguments are for `working-set` only.

    Raises ValueError for a name that is not in `NAMES`.
    """
    if name == "working-set":
        return WorkingSet(working_set, return_probability=return_probability)
    if name not in _PUBLISHED:
        raise ValueError(f"no admission policy is called {name!r}; there are {', '.join(NAMES)}")
    return _PUBLISHED[name]()
