"""What `xferlib doctor` prints: a table of the backends, the machine, and a line for all that was measured or found."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from xferlib.cli.breakeven import BreakEven
from xferlib.cli.doctor import Report
from xferlib.cli.link import PciLink
from xferlib.staging.profile import VARIABLE
from xferlib.words import counted, in_words

__all__ = ["show"]


def show(report: Report) -> None:
    """Print the report for people."""
    console = Console()
    table = Table(title="Backends", title_justify="left")
    table.add_column("backend", style="bold", no_wrap=True)
    table.add_column("ready", no_wrap=True)
    table.add_column("device, or why not and what to type", overflow="fold")
    for state in report["backends"]:
        chosen = " (auto)" if state["name"] == report["auto"] else ""
        table.add_row(state["name"] + chosen, "[green]yes[/green]" if state["ready"] else "[red]no[/red]", escape(_words(state)))
    console.print(table)
    for name, text in _machine(report):
        console.print(f"[bold]{name:<9}[/bold] {escape(text)}", highlight=False)
    for state in report["backends"]:
        if state["link"] is not None:
            words = (
                f"could not be measured: {state['link']['error']}" if "error" in state["link"] else str(PciLink(**state["link"]))
            )
            console.print(f"[bold]link[/bold]      {escape(state['name'])}: {escape(words)}", highlight=False)
        for path in state["paths"] or []:
            console.print(f"[bold]copy[/bold]      {escape(state['name'])}: {escape(path['words'])}", highlight=False)
        if state["ready"]:
            console.print(f"[bold]pin[/bold]       {escape(state['name'])}: {escape(_pays(state))}", highlight=False)
            shape = f"{state['name']}: {state['staging'] or 'unknown'}, threads x chunk, for pageable memory. {VARIABLE} sets it"
            console.print(f"[bold]staging[/bold]   {escape(shape)}", highlight=False)
    for line in [*report["findings"], *(line for state in report["backends"] for line in state["findings"])]:
        console.print(f"[yellow]note[/yellow]      {escape(line)}", highlight=False)


def _pays(state: Report) -> str:
    if state["pin"] is None:
        return "nothing is page-locked here, so locking memory in place costs nothing and gains nothing"
    if "error" in state["pin"]:
        return f"could not be measured: {state['pin']['error']}"
    return str(BreakEven(**{name: value for name, value in state["pin"].items() if name != "transfers"}))


def _words(state: Report) -> str:
    if not state["ready"]:
        return str(state["reason"])
    flags = [flag for flag, on in state["capabilities"].items() if on]
    versions = ", ".join(f"{name} {version}" for name, version in state["versions"].items())
    return f"{state['device']}; capabilities: {', '.join(flags) or 'none'}{'; ' if versions else ''}{versions}"


def _machine(report: Report) -> list[tuple[str, str]]:
    memory = {name: None if nbytes is None else in_words(nbytes) for name, nbytes in report["memory"].items()}
    limited = report["memory"]["limit_nbytes"] < report["memory"]["total_nbytes"]
    limit = f", limited to {memory['limit_nbytes']} by its control group" if limited else ""
    # Drivers lock pages by themselves and do not ask for such a limit: seen on an H200, with driver 580.
    locked = f" (ulimit -l, {memory['memlock_nbytes']}, does not bear on it)" if memory["memlock_nbytes"] else ""
    return [
        ("versions", ", ".join(f"{name} {version}" for name, version in report["versions"].items())),
        ("machine", f"{counted(report['cores'], 'core')}, {report['platform']}"),
        (
            "memory",
            f"{memory['total_nbytes']}, {memory['available_nbytes']} available{limit}; pinned at most "
            f"{memory['pinned_limit_nbytes']} unless pinned_limit= says otherwise{locked}",
        ),
    ]
