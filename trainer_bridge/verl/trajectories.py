"""Which turn of which trajectory a request is, told from request ids and prompts alone.

verl sends one request id through all turns of a trajectory, and each turn's prompt extends the one before. Under
``rollout.full_determinism`` the ids are ``det-0``, ``det-1``, ... and come again at every step, in validation too; so
an id alone names nothing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainer_bridge.verl.seeds import SampleTag, prompt_digest

MAX_TRAJECTORIES = 100_000
_DETERMINISTIC = "det-"


@dataclass(slots=True)
class _Trajectory:
    tag: SampleTag
    length: int
    """tokens of the latest prompt"""
    latest: str
    """digest of the latest prompt"""
    aborted: bool = False
    """the latest turn was cut from outside and will be resumed"""


class Trajectories:
    """Remembers the trajectories under way; one per router."""

    def __init__(self, limit: int = MAX_TRAJECTORIES) -> None:
        self._limit = limit
        self._known: OrderedDict[str, _Trajectory] = OrderedDict()
        self._begun: Counter[tuple[str, int]] = Counter()
        self._step: int | None = None

    def tag(self, request_id: str, prompt_ids: Sequence[int], *, step: int, index: int | None) -> SampleTag:
        """Tag of the next generate call of a trajectory.

        Args:
            request_id: verl's, the same in all turns.
            prompt_ids: [P] everything fed so far.
            step: global step of the weights being served now.
            index: place in verl's batch, None where verl does not tell.
        """
        known = self._known.get(request_id)
        if known is not None and self._continues(known, request_id, prompt_ids, step):
            if not known.aborted:
                known.tag = replace(known.tag, turn=known.tag.turn + 1)
        else:
            known = _Trajectory(self._begin(request_id, prompt_ids, step, index), 0, "")
            self._known[request_id] = known
        known.length, known.latest, known.aborted = len(prompt_ids), prompt_digest(prompt_ids), False
        self._known.move_to_end(request_id)
        while len(self._known) > self._limit:
            self._known.popitem(last=False)
        return known.tag

    def aborted(self, request_id: str) -> None:
        """The latest turn ended from outside: the next call with this id resumes it."""
        if request_id in self._known:
            self._known[request_id].aborted = True

    def _continues(self, known: _Trajectory, request_id: str, prompt_ids: Sequence[int], step: int) -> bool:
        if request_id.startswith(_DETERMINISTIC) and step != known.tag.step:
            return False
        longer = len(prompt_ids) >= known.length if known.aborted else len(prompt_ids) > known.length
        return longer and prompt_digest(prompt_ids[: known.length]) == known.latest

    def _begin(self, request_id: str, prompt_ids: Sequence[int], step: int, index: int | None) -> SampleTag:
        if step != self._step:
            # Counts start anew at every step, so that a run resumed from a checkpoint draws what the first one drew.
            self._begun.clear()
            self._step = step
        if index is None:
            number = request_id.removeprefix(_DETERMINISTIC)
            index = int(number) if request_id.startswith(_DETERMINISTIC) and number.isdigit() else 0
        digest = prompt_digest(prompt_ids)
        occurrence = self._begun[digest, index]
        self._begun[digest, index] += 1
        return SampleTag(step, digest, index, occurrence, 0)
