"""Engines that are wrong in one place, and the test of the harness that must see it."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MUTANTS", "Mutant"]


class Mutant(NamedTuple):
    """`name` says what is wrong. `old` stands once in the file, and `new` takes its place."""

    name: str
    old: str
    new: str
    test: str
    sanitizer: str = "plain"
    file: str = "engine.c"


MUTANTS = (
    # Order.
    Mutant(
        "every chunk waits for what comes before the job",
        "if (!o.at && first && j->after)",
        "if (!o.at && j->after)",
        "orders_its_copies",
    ),
    Mutant(
        "the wait is entered when the job is submitted",
        "        figures.jobs++;\n",
        "        figures.jobs++;\n        if (after) enter(l->calls), l->calls->wait(l->stream, after, 0), j->after = NULL;\n",
        "orders_its_copies",
    ),
    Mutant("nothing is waited for", "if (!o.at && first && j->after)", "if (!o.at && !first && j->after)", "orders_its_copies"),
    Mutant(
        "the job's event is recorded behind the first copy",
        "return ++j->issued == j->started &&",
        "return ++j->issued == 1 &&",
        "orders_its_copies",
    ),
    Mutant(
        "a job is issued when its last part has begun",
        "(j->last_issued && !has_failed(j))",
        "(all_started(j) && !has_failed(j))",
        "orders_its_copies",
    ),
    Mutant(
        "two threads issue at once", "!l->calls || l->issuing || !l->ready.first", "!l->calls || !l->ready.first", "moves_slowly"
    ),
    Mutant(
        "the owner is asked for the job's event with each chunk",
        "    c->last = is_last(j);\n",
        "    c->last = is_last(j) || true;\n",
        "moves_by_its_owner",
    ),
    Mutant(
        "a thread stays in its first context",
        "if (inside && entered == calls->context) return 0;",
        "if (inside) return 0;",
        "waits_for_no_lane",
    ),
    Mutant(
        "a context without a name is not entered",
        "if (inside && entered == calls->context) return 0;",
        "if (entered == calls->context) return 0;",
        "enters_again_where_it_works_for_others",
    ),
    Mutant("whoever waits is where it was", "    inside = false;\n", "", "enters_again_where_it_works_for_others"),
    # Chunks.
    Mutant(
        "a chunk is used again before its copy is made",
        "        c->state = COPYING;\n        push(&c->lane->copying, c);\n        if (c->lane->calls) {",
        "        c->state = COPYING;\n        give_back(c);\n        if (false) {",
        "moves_slowly",
    ),
    Mutant(
        "a chunk of which nobody knows is given away",
        "    } else if (o.enqueued) {\n        lose(c);\n",
        "    } else if (o.enqueued) {\n        give_back(c);\n",
        "gives_away_no_chunk_that_may_be_read",
    ),
    Mutant(
        "a chunk that nobody can ask for is given away",
        "            lose(c);\n",
        "            give_back(c);\n",
        "gives_away_no_chunk_that_it_cannot_ask_for",
    ),
    Mutant(
        "jobs wait for chunks that were lost",
        "    fail_without_chunks(c->lane);\n",
        "",
        "fails_when_its_chunks_are_lost",
    ),
    Mutant(
        "a job waits for chunks that were lost before",
        "        fail_without_chunks(l);\n",
        "",
        "fails_when_its_chunks_are_lost",
    ),
    Mutant("nobody is told that a chunk was lost", "    j->lost = true;\n", "", "fails_alone_to_the_device"),
    Mutant(
        "what was never enqueued is lost",
        "    if (o.at) return o;\n",
        "    if (o.at) return o.enqueued = true, o;\n",
        "fails_alone_to_the_device",
    ),
    Mutant("blocks side by side are joined", "p->block != p[-1].block || ", "", "joins_what_belongs_together"),
    Mutant("pieces that lie apart are joined", " || device != round_up(w->base + w->end)", "", "joins_what_belongs_together"),
    Mutant(
        "a chunk holds more than it can",
        "left < room ? left : room, at};",
        "left, at};",
        "moves_by_one_thread",
        "addresses",
    ),
    Mutant(
        "a full chunk goes on",
        "    } else if (w->offset) {",
        "    } else if (w->offset > capacity) {",
        "moves_by_one_thread",
        "addresses",
    ),
    Mutant(
        "somebody else says what is reached",
        "l->calls || c->state != wanted",
        "c->state != wanted",
        "may_be_called_again",
    ),
    # How far a job has come.
    Mutant("the source is free while it is read", "return j->filling == 0 && (", "return (", "frees_its_source", "threads"),
    Mutant(
        "the source is free before all parts have begun",
        "(all_started(j) || has_failed(j));",
        "(j->started || has_failed(j));",
        "frees_its_source",
    ),
    Mutant("a job has finished while a chunk is out", "!j->finished && j->out == 0 &&", "!j->finished &&", "stands_a_rush"),
    Mutant(
        "what lands is not copied",
        "if (!has_failed(c->job) && !copy_part(c))",
        "if (has_failed(c->job) && !copy_part(c))",
        "moves_by_one_thread",
    ),
    Mutant(
        "a job may be forgotten before it was told of",
        "!j->finished || j->listed ? XE_BUSY",
        "!j->finished ? XE_BUSY",
        "may_be_called_again",
    ),
    Mutant(
        "a job is submitted twice",
        "if (status == XE_OK && !*place) {",
        "if (status == XE_OK) {",
        "may_be_called_again",
        "addresses",
    ),
    Mutant(
        "what has begun is dropped",
        "j->started || j->finished ? XE_NOT_YET",
        "j->finished ? XE_NOT_YET",
        "drops_what_has_not_begun",
    ),
    # Failures.
    Mutant("a failed call is not told", "    if (o.at) fail(j, o.status, o.at);\n", "", "fails_alone_to_the_host"),
    Mutant(
        "a failed event counts as reached",
        "    if (status != 0) fail(c->job, status, at);\n",
        "    (void)at;\n",
        "tells_what_an_event_says",
    ),
    Mutant(
        "a failed job goes on",
        "    unqueue(j);\n}\n\nstatic void give_back",
        "}\n\nstatic void give_back",
        "drops_what_has_not_begun",
    ),
    Mutant(
        "what failed behind its copy is not told",
        'else fail(j, status, "recording the job\'s event");',
        "else j->last_issued = true;",
        "fails_alone_to_the_device",
    ),
    Mutant(
        "a source that was cut off counts as read",
        '    if (!whole) fail(j, SIGBUS, "reading the source");\n',
        "",
        "survives_a_file_that_is_cut_off",
    ),
    Mutant(
        "a file that is cut off ends the process",
        "    if (guarded) {\n",
        "    if (guarded && number == 0) {\n",
        "survives_a_file_that_is_cut_off",
        "plain",
        "copying.c",
    ),
    # Threads.
    Mutant("signals come to the engine", "        sigfillset(&all);\n", "        sigemptyset(&all);\n", "blocks_signals"),
    Mutant(
        "nobody is asked without a sleep between",
        "else if (++quiet > ROUNDS_AWAKE)",
        "else if (++quiet > ROUNDS_AWAKE << 20)",
        "costs_little_while_held",
    ),
    Mutant(
        "it goes on when it was stopped",
        "    while (!stopping)\n        if (!step()) rest();",
        "    for (;;)\n        if (!step()) rest();",
        "stops",
    ),
    Mutant(
        "large jobs go before small ones",
        "l->small.first && !(l->large.first && l->large_next)",
        "l->small.first && !l->large.first",
        "is_fair",
    ),
    Mutant(
        "small jobs go before large ones for ever",
        "l->small.first && !(l->large.first && l->large_next)",
        "l->small.first",
        "is_fair",
    ),
    Mutant(
        "a thread waits for an event",
        "        issued(c, o);\n    }\n    l->issuing = false;",
        "        while (o.recorded && l->calls->query(c->event) == l->calls->not_ready) {}\n"
        "        issued(c, o);\n    }\n    l->issuing = false;",
        "waits_for_no_lane",
    ),
    Mutant(
        "what was begun before there were threads is left to nobody",
        "what this one has begun is theirs now.\n        wake(1);\n",
        "what this one has begun is theirs now.\n",
        "takes_over_to_the_device",
    ),
    Mutant("nobody asks during a call", "    if (copying && !polling) wake(1);\n", "", "waits_for_no_call"),
    Mutant(
        "a call is forgotten when it is stopped",
        "        leave();\n        outcome o = issue(c, first);\n        come_back();\n",
        "        pthread_mutex_unlock(&mu);\n        outcome o = issue(c, first);\n        pthread_mutex_lock(&mu);\n",
        "stops_behind_a_call",
    ),
    Mutant("it asks when nothing is in flight", "        copying--;\n", "", "costs_little_while_held"),
    Mutant(
        "the same lanes are asked each time",
        "rounds++ * MOST_LANES_ASKED % busy",
        "rounds * MOST_LANES_ASKED % busy",
        "asks_every_lane",
    ),
    # Copies.
    Mutant(
        "the last bytes are left out",
        "memcpy(to + stored, from + stored, nbytes - stored);",
        "",
        "copies_whole",
        "plain",
        "copying.c",
    ),
    Mutant("what is not aligned is left out", "        memcpy(to, from, head);\n", "", "copies_whole", "plain", "copying.c"),
)
