"""A rollout for people: the conversation call by call, with colours in a terminal and plain in a pipe."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kitestring_cli.run.views import figure
from kitestring_cli.show.messages import message_text, tool_name
from kitestring_cli.show.printable import one_line, printable
from kitestring_cli.show.story import AttemptStory, RolloutStory, Samples, new_messages
from kitestring_rollout.traces.records import CallRecord, ChoiceRecord, EndRecord, Json
from kitestring_trainer.samples.batches import SampleRecord

_ROLE_STYLES = {"system": "dim", "user": "bold blue", "assistant": "bold green", "tool": "bold magenta"}
_CLASS_STYLES = {"Succeeded": "green", "AgentFailed": "red", "TimedOut": "red", "Infrastructure": "yellow"}
_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "seed", "n", "stop")
"""What is worth a word at each call."""
_ROLE_WIDTH = 11


def show_rollout(console: Console, story: RolloutStory, attempts: Sequence[AttemptStory], *, ids: bool) -> None:
    """The rollout, then each of `attempts`; the others get a line each."""
    planned, committed = story.planned, story.committed
    head = Text.assemble((planned.rollout, "bold"), f"  {planned.mode}, step {planned.step}")
    if committed is None:
        head.append("  not committed", style="yellow")
    else:
        head.append(f", task {committed.task}, group {committed.group}")
    console.print(head, soft_wrap=True)
    if committed is not None:
        console.print(verdict(committed.klass, committed.reason, committed.reward, committed.reward_source))
        if committed.excluded is not None:
            console.print(Text(f"excluded from training: {one_line(committed.excluded, 300)}", style="yellow"))
    for note in story.notes:
        console.print(Text(f"note: {note}", style="yellow"))
    if not story.attempts:
        console.print(Text("no attempt left a trace", style="yellow"))
    shown = {attempt.attempt for attempt in attempts}
    for place, attempt in enumerate(story.attempts, start=1):
        if len(story.attempts) > 1 or attempt.attempt not in shown:
            console.print(_attempt_line(place, attempt, shown=attempt.attempt in shown), soft_wrap=True)
    for attempt in attempts:
        show_attempt(console, attempt, story.samples, ids=ids)


def show_attempt(console: Console, attempt: AttemptStory, samples: Samples, *, ids: bool) -> None:
    """Every call of the attempt, its end, its output."""
    console.print()
    console.print(Text(f"attempt {attempt.attempt}", style="dim"), soft_wrap=True)
    for place, call in enumerate(attempt.calls):
        show_call(console, call, attempt.calls[:place], samples, ids=ids)
    show_end(console, attempt)


def show_call(
    console: Console, call: CallRecord, earlier: Sequence[CallRecord], samples: Samples, *, ids: bool
) -> None:
    """What is new in the call's prompt, and its reply. `earlier` are the calls of the attempt before it."""
    console.print()
    goes_on_from, messages = new_messages(call, earlier)
    console.print(_call_line(call), soft_wrap=True)
    if call.error is not None:
        console.print(Text(f"  error: {one_line(call.error, 500)}", style="red"))
    if call.nonconforming:
        fields = ", ".join(one_line(name, 40) for name in call.nonconforming)
        console.print(Text(f"  asked for other sampling than training assumes: {fields}", style="yellow"))
    if earlier and goes_on_from != earlier[-1].seq:
        where = "a new conversation" if goes_on_from is None else f"goes on from call {goes_on_from}"
        console.print(Text(f"  {where}", style="dim"))
    if call.tools and (not earlier or call.tools != earlier[-1].tools):
        names = ", ".join(one_line(tool_name(tool), 60) for tool in call.tools)
        console.print(Text(f"  tools: {names}", style="dim"))
    for message in messages:
        _message(console, message, str(message.get("role", "?")))
    if ids:
        _ids(console, "prompt ids", call.prompt_token_ids.tolist())
    for choice in call.choices:
        _choice(console, call, choice, samples.get((call.attempt, call.seq, choice.index)), ids=ids)


def show_end(console: Console, attempt: AttemptStory) -> None:
    """How the attempt ended, and what the agent gave back."""
    console.print()
    if attempt.lost is not None:
        console.print(Text(f"lost, never trained on: {one_line(attempt.lost, 500)}", style="red"))
    end = attempt.end
    if end is None:
        return
    show_output(console, end)
    console.print(verdict(end.outcome, end.reason, end.reward, end.reward_source).append_text(_circumstances(end)))


def show_output(console: Console, end: EndRecord) -> None:
    """What the agent gave back, where it was recorded."""
    if end.output is not None:
        block(console, "output", printable(end.output.rstrip("\n")), "bold")


def verdict(klass: str, reason: str | None, reward: float | None, source: str | None) -> Text:
    """Failure class, reward and reason in a line."""
    text = Text.assemble((klass, f"bold {_CLASS_STYLES.get(klass, '')}".rstrip()))
    if reward is not None:
        text.append("  reward ")
        text.append(f"{reward:g}", style="bold")
        text.append(f" ({source})" if source else "")
    else:
        text.append("  no reward", style="yellow")
    if reason:
        text.append(f"  {one_line(reason, 500)}")
    return text


def _circumstances(end: EndRecord) -> Text:
    seconds = f", {end.seconds:.2f} s" if end.seconds is not None else ""
    return Text(f"{seconds}, exit code {end.exit_code}" if end.exit_code else seconds)


def _attempt_line(place: int, attempt: AttemptStory, *, shown: bool) -> Text:
    end = attempt.end
    klass = end.outcome if end else "no end record"
    why = attempt.lost or (end.reason if end else None)
    text = Text.assemble(f"attempt {place}  ", (attempt.attempt, "dim"), f"  {klass}, {len(attempt.calls)} calls")
    if attempt.counts:
        text.append(", counts", style="green")
    if why:
        text.append(f": {one_line(why, 200)}", style="yellow")
    if not shown:
        text.append(f"  (--attempt {place})", style="dim")
    return text


def _call_line(call: CallRecord) -> Text:
    style = "green" if call.outcome == "ok" else "red"
    text = Text.assemble((f"call {call.seq}", "bold cyan"), f"  {one_line(call.model, 80)}")
    if call.requested_model != call.model:
        text.append(f" (asked for as {one_line(call.requested_model, 80)})")
    if call.agent is not None:
        text.append(f", agent {one_line(call.agent, 80)}")
    versions = sorted({span.version for choice in call.choices for span in choice.versions})
    if versions:
        text.append(f", version {', '.join(versions)}")
    elif not call.trained:
        text.append(", not trained")
    text.append("  ")
    text.append(f"{call.outcome}{f' {call.status}' if call.status not in (None, 200) else ''}", style=style)
    text.append(f"  {figure(call.prompt_tokens, 0)} → {figure(call.completion_tokens, 0)} tokens")
    text.append(f", {(call.ended_unix_nano - call.started_unix_nano) / 1e9:.2f} s")
    sampling = ", ".join(
        f"{name} {one_line(str(call.sampling[name]), 40)}" for name in _SAMPLING if name in call.sampling
    )
    if sampling:
        text.append(f"  {sampling}", style="dim")
    return text


def _choice(
    console: Console, call: CallRecord, choice: ChoiceRecord, sample: SampleRecord | None, *, ids: bool
) -> None:
    role = "assistant" if len(call.choices) == 1 else f"choice {choice.index}"
    if choice.message is not None:
        _message(console, choice.message, role, style=_ROLE_STYLES["assistant"])
    elif choice.text is not None:
        block(console, role, printable(choice.text), _ROLE_STYLES["assistant"])
    else:
        block(console, role, "(contents were not recorded)", "dim")
    notes = [f"finish {choice.finish_reason}"] if choice.finish_reason else []
    if choice.tool_calls:
        notes.append(f"{choice.tool_calls} tool call{'s' if choice.tool_calls > 1 else ''}")
    if sample is not None:
        notes.append(f"row {sample.row}" if sample.row is not None else "in no row")
        notes.append(f"credit {sample.credit:g}")
        if sample.advantage is not None:
            notes.append(f"advantage {sample.advantage:+.3f}")
        if sample.excluded is not None:
            notes.append(f"excluded: {one_line(sample.excluded, 200)}")
    if notes:
        console.print(Padding(Text(", ".join(notes), style="dim"), (0, 0, 0, 2 + _ROLE_WIDTH), expand=False))
    if ids:
        _ids(console, "reply ids", choice.token_ids.tolist())
        _ids(console, "logprobs", [f"{value:.4f}" for value in choice.logprobs.tolist()])


def _message(console: Console, message: Json, role: str, style: str | None = None) -> None:
    """A message in OpenAI's shape, whatever its agent made of it."""
    shown = one_line(role, _ROLE_WIDTH - 1)
    block(console, shown, message_text(message), style or _ROLE_STYLES.get(role, "bold"))


def block(console: Console, title: str, text: str, style: str, *, indent: int = 2) -> None:
    """A title on the left, wrapped text on the right."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(width=_ROLE_WIDTH - 1, no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(Text(title, style=style), Text(text))
    console.print(Padding(table, (0, 0, 0, indent), expand=False))


def _ids(console: Console, title: str, values: Sequence[object]) -> None:
    block(console, title, " ".join(map(str, values)) or "(none recorded)", "dim")
