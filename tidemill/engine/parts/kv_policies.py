"""KVPolicies: settles the policies of requests by which some of their tokens stay in their pages."""

from __future__ import annotations

import msgspec

from tidemill.config import fmt_bytes
from tidemill.engine.moments import Engine, EngineComponents, Part, Submission
from tidemill.errors import InvalidRequest
from tidemill.types.kv_policy import CachePolicy, settle


class KVPolicies(Part):
    @classmethod
    def of(cls, engine: Engine, components: EngineComponents) -> KVPolicies:
        return cls()

    def submit(self, submission: Submission) -> None:
        request, config = submission.request, self.engine.config
        if (policy := config.policy_of(request.params)) is None:
            return
        num_prompt = len(request.prompt_ids)
        room = config.context_of(request.params) - num_prompt
        most = room if request.params.max_tokens is None else min(request.params.max_tokens, room)
        settled = settle(policy, num_prompt, most, config.max_context)
        submission.kv_policy = settled and self._counted(settled)

    def _counted(self, policy: CachePolicy) -> CachePolicy:
        """The policy with the number of bytes that its row keeps beside its pages, where they are
        counted."""
        shape, most = self.engine.model_config, self.engine.config.policy_bytes
        if not most:
            return policy
        num_bytes = policy.num_beside(shape.num_layers, shape.num_kv_heads, shape.head_dim)
        if num_bytes > most:
            what = (
                f"The KV policy {policy.kind} would keep {fmt_bytes(num_bytes)} beside the pages of "
                f"this request; all have {fmt_bytes(most)}."
            )
            raise InvalidRequest(
                what, fix="Ask for fewer sinks, or a smaller budget.", param="kv_policy"
            )
        return msgspec.structs.replace(policy, beside_bytes=num_bytes)
