"""MarkedAnswer: a stream with marks on its way to a client, and the state from which another replica continues it."""

from __future__ import annotations

from typing import Any

import msgspec

from weft.fleet.gateway.answer import ResumableAnswer
from weft.fleet.gateway.completion import MAX_HELD_IDS, is_id_list
from weft.fleet.gateway.events import EVENT_BYTES, EventSplitter
from weft.fleet.gateway.stream_apis import ReceivedMark, StreamApi
from weft.fleet.upstreams.upstream import ResponseHead, UpstreamError


class MarkedAnswer(ResumableAnswer):
    """The parts of one answer, possibly from several replicas, in an API without room for token ids.

    A replica that was asked for marks sends a mark first, and a mark after each part. A part is passed on once its mark
    has arrived; if it does not arrive, another replica computes the part again. `sent_events`: number of events that
    the client has.

    `continuable`: the replica was asked for marks; False once it sends a stream without them, which passes unchanged.
    `keeps_marks`: the client asked for marks. `model`: the name in the answer; None for the upstream's. `reads_usage`:
    the tokens are counted.
    """

    def __init__(
        self,
        api: StreamApi,
        *,
        continuable: bool,
        keeps_marks: bool = False,
        model: str | None = None,
        reads_usage: bool = False,
        begun: list[int] | None = None,
    ) -> None:
        super().__init__(continuable=continuable, begun=begun)
        self._api, self._keeps_marks, self._model, self._reads_usage = api, keeps_marks, model, reads_usage
        self._splitter = EventSplitter(api.part_end)
        self._has_marks = continuable  # marks stay removed if no replica can continue the stream
        self._marked = False  # a mark of this replica has arrived
        self._resumed = False
        self._held: list[bytes] = []  # parts whose mark has not arrived
        self._held_bytes = 0
        self._last_error = b""

    def fits(self, head: ResponseHead) -> bool:
        """Return True for a response that continues this answer."""
        return head.status == 200 and (head.is_line_stream if self._api.lines else head.is_event_stream)

    @property
    def error_event(self) -> bytes:
        """The error event of the last replica; empty if it sent none."""
        if self._held and self._api.is_error(self._held[-1]):
            return self._held[-1]
        return self._last_error

    def resume(self) -> list[int]:
        """Drop parts without a mark. Returns the token ids after which the next replica has to continue."""
        self._last_error = self.error_event
        self._splitter, self._broken = EventSplitter(self._api.part_end), None
        self._marked, self._resumed = False, True
        self._drop_held()
        self.note_resumed()
        return self.token_ids

    def push(self, piece: bytes) -> bytes:
        """The bytes for the client. To be followed by `check`."""
        shown: list[bytes] = []
        for part in self._splitter.push(piece):
            self._push_part(part, shown)
            if self._broken is not None:
                break
        return b"".join(shown)

    def _push_part(self, part: bytes, shown: list[bytes]) -> None:
        mark = self._api.read_mark(part) if self._has_marks else None
        if mark is not None:
            self._take_mark(mark, shown)
            if self._keeps_marks:
                shown.append(part)
        elif not self.continuable or not self._api.data(part):
            self._pass_on(part, shown)
        elif self._marked:
            self._hold(part)
        elif self._resumed:
            self._broken = UpstreamError("it cannot continue streams of this API", code="not-continued")
        else:
            self._give_up(shown)
            self._pass_on(part, shown)

    def _pass_on(self, part: bytes, shown: list[bytes]) -> None:
        """Show a part without waiting for a mark. Its tokens are unknown without marks: it counts as one token."""
        if not self._marked and self._api.data(part):
            self.tokens += 1
        shown.append(self._show(part))

    def _take_mark(self, mark: ReceivedMark, shown: list[bytes]) -> None:
        """Pass on the parts whose mark has arrived."""
        self._marked = True
        self.tokens += len(mark.token_ids)
        if not self.continuable:
            return
        shown += map(self._show, self._held)
        self.sent_events += len(self._held)
        self._drop_held()
        self.done |= mark.last
        if not is_id_list(mark.token_ids) or len(self.token_ids) + len(mark.token_ids) > MAX_HELD_IDS:
            self._give_up(shown)
        else:
            self.token_ids += mark.token_ids

    def _hold(self, part: bytes) -> None:
        self._held.append(part)
        self._held_bytes += len(part)
        if self._held_bytes > EVENT_BYTES:
            self._broken = _too_large()

    def _drop_held(self) -> None:
        self._held, self._held_bytes = [], 0

    def _give_up(self, shown: list[bytes]) -> None:
        """Stop holding parts: no other replica can continue."""
        self.continuable, self.token_ids = False, []
        shown += map(self._show, self._held)
        self._drop_held()

    def finish(self) -> bytes:
        """The bytes for the client at the end of the stream; if it may be continued, only parts with their mark."""
        rest = self._splitter.take_rest()
        is_mark = self._has_marks and self._api.read_mark(rest) is not None
        return self._show(rest) if rest and not self.continuable and (self._keeps_marks or not is_mark) else b""

    def check(self) -> None:
        """Raise UpstreamError for a part that is too long."""
        if self._broken is not None:
            raise self._broken
        if self._splitter.is_over_limit:
            raise _too_large()

    def _show(self, part: bytes) -> bytes:
        """A part as the client gets it."""
        if self._model is None and not (self._reads_usage and (b'"usage"' in part or b"eval_count" in part)):
            return part
        data = self._api.data(part)
        try:
            values: Any = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return part
        if not isinstance(values, dict):
            return part
        self._read_usage(values)
        if self._model is None or b'"model"' not in data:
            return part
        self._api.name_model(values, self._model)
        return part.replace(data, msgspec.json.encode(values))

    def _read_usage(self, values: dict[str, Any]) -> None:
        usage: dict[str, Any] = dict(self.usage or {})
        self._api.read_usage(values, usage)
        self.usage = usage or None


def _too_large() -> UpstreamError:
    return UpstreamError(f"it sent an event of more than {EVENT_BYTES} bytes", code="event-too-large")
