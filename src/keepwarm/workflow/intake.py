"""Owns Intake: the synchronous way from a draft to a request with a session, and the record of both its ends.

Never waits, never reads a clock and never chooses a worker. Called by `workflow.dispatch`, live and simulated.
"""

from collections.abc import Callable, Mapping
from typing import Any

from keepwarm.core.blocks import Namespace, extend_chain
from keepwarm.core.decision import Decision
from keepwarm.core.errors import ModelNotFound
from keepwarm.core.ids import RequestId, SessionKey
from keepwarm.core.request import Request
from keepwarm.core.turns import TurnEnd
from keepwarm.engine.executor import ModelInfo
from keepwarm.workflow.draft import Draft
from keepwarm.workflow.lineage import PromptTrail
from keepwarm.workflow.overlap import LatestPrompts
from keepwarm.workflow.passages import arrival_record, end_record
from keepwarm.workflow.returns import ReturnTimes
from keepwarm.workflow.sessions import SessionTable


class Intake:
    def __init__(
        self,
        *,
        models: Mapping[str, ModelInfo],
        sessions: SessionTable,
        new_request_id: Callable[[], str],
        on_decision: Callable[[float, Decision[Any]], None],
    ) -> None:
        self.models = models
        self._sessions = sessions
        self._new_request_id = new_request_id
        self._on_decision = on_decision
        self._returns = ReturnTimes()
        self._prompts = LatestPrompts()
        self._open: dict[RequestId, SessionKey] = {}

    def accept(self, draft: Draft, now_s: float) -> Request:
        """The request made of `draft`. Raises ModelNotFound."""
        info = self.models.get(draft.model)
        if info is None:
            raise ModelNotFound(
                f"no worker serves the model {draft.model!r}; served: {', '.join(self.models)}", param="model"
            )
        root = Namespace(model=info.fingerprint, block_size=info.block_size, salt=draft.cache_salt).root()
        keys = extend_chain(root, root, draft.token_ids, info.block_size)
        request_id = RequestId(self._new_request_id())
        trail = PromptTrail(root=root, keys=keys, token_ids=draft.token_ids, block_size=info.block_size)
        session = self._sessions.resolve(
            request_id, draft.identity, trail, tenant_id=draft.tenant_id, now_s=now_s
        )
        self._on_decision(now_s, session)
        place = (draft.tenant_id, session.choice.session_id)
        self._returns.on_arrival(place, now_s)
        expected_return_s = draft.hints.expected_return_s
        if expected_return_s is None:
            expected_return_s = self._returns.expected_s(place)
        request = Request(
            request_id=request_id,
            model=draft.model,
            token_ids=draft.token_ids,
            sampling=draft.sampling,
            session=session.choice,
            block_root=root,
            prompt_keys=tuple(keys),
            tenant_id=draft.tenant_id,
            arrival_s=now_s,
            hints=draft.hints,
            reuse=draft.reuse,
            retention=draft.retention,
            expected_return_s=expected_return_s,
            after_tool=draft.after_tool,
        )
        overlap = self._prompts.take(place, request.parent_key, keys)
        self._on_decision(now_s, arrival_record(request, overlap, info.block_size))
        self._open[request_id] = place
        return request

    def on_ended(self, request_id: RequestId, turn: TurnEnd, now_s: float) -> None:
        """A request has ended, in whatever way: its session's gap begins. A second call does nothing."""
        if place := self._open.pop(request_id, None):
            self._returns.on_finished(place, now_s)
            self._on_decision(now_s, end_record(request_id, turn))
