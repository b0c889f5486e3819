"""Engines that are wrong in one place, and the test of the harness that must see it."""

from __future__ import annotations

import os
from typing import NamedTuple

__all__ = ["MUTANTS", "Mutant"]


TOUCHED_IN_HUGE_PAGES = "puts_huge_pages_under_what_is_touched"
WRITTEN_IN_HUGE_PAGES = "puts_huge_pages_under_results"
ENDS_IN_A_HUGE_PAGE = "tells_where_a_file_ends_in_a_huge_page"
IN_COPYING = (WRITTEN_IN_HUGE_PAGES, "plain", "copying.c")


class Mutant(NamedTuple):
    """`name` says what is wrong. `old` stands once in the file, and `new` takes its place."""

    name: str
    old: str
    new: str
    test: str
    sanitizer: str = "plain"
    file: str = "engine.c"


STAYS_AWAKE = """    size_t left = atomic_load_explicit(&called, memory_order_relaxed);
    while (left && !atomic_compare_exchange_weak_explicit(&called, &left, left - 1, memory_order_relaxed, memory_order_relaxed)) {}
    return left > 0;
}

static bool is_work(unsigned seen) { return atomic_load_explicit(&work_told, memory_order_relaxed) != seen; }

static bool is_news(unsigned seen) { return atomic_load_explicit(&news_told, memory_order_relaxed) != seen; }

// Look out for a moment whether there is more: waking up takes longer than the next part needs to come. Not where the cores are
// wanted. Lets go of `mu` meanwhile.
static bool stays_awake(bool (*more)(unsigned), unsigned seen, int64_t microseconds) {
    if (!spares_cores) return false;
    unlock();
    struct timespec began;
    clock_gettime(CLOCK_MONOTONIC, &began);
    bool come = false;
    do
        for (int n = 0; n < BREATHS && !come; come = more(seen), n++) take_breath();
    while (!come && since(&began) < microseconds);
    lock();
    // Asked again: what has come since the last look has woken nobody, and nobody will be woken for it.
    return come || stopping || more(seen);
"""
"""Mutants of it do as where there are cores to spare, whatever this machine has."""

CONTEXT = "context.c"
CALLBACKS = "callbacks.c"
HANDED, LATE, ENDED = "hands_its_callbacks_over", "leaves_callbacks_that_come_late", "ends_with_callbacks_under_way"
IN_PLACE, NOT_THERE = "calls_in_its_context", "calls_nothing_where_it_cannot_go"

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
        "return j->finished || j->last_issued;",
        "return j->finished || all_started(j);",
        "is_issued_when_its_event_is_recorded",
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
        "here.inside && here.context == calls->context",
        "here.inside",
        "waits_for_no_lane",
    ),
    Mutant(
        "a context without a name is not entered",
        "here.inside && here.context == calls->context",
        "here.context == calls->context",
        "enters_again_where_it_works_for_others",
    ),
    Mutant(
        "whoever waits is where it was",
        "    here.inside = false;\n    here.enter = NULL;",
        "    here.enter = NULL;",
        "enters_again_where_it_works_for_others",
    ),
    Mutant(
        "whoever waited is where it worked",
        "if (here.guest && here.enter) here.enter(here.context_before);",
        "",
        "enters_again_where_it_works_for_others",
    ),
    Mutant(
        "whoever waited stays relaxed",
        "if (here.guest && here.capture_mode) here.capture_mode(&here.mode_before);",
        "",
        "enters_again_where_it_works_for_others",
    ),
    Mutant(
        "a device without modes is asked for one",
        "if (!calls->capture_mode || here.capture_mode",
        "if (here.capture_mode && here.capture_mode",
        "enters_again_where_it_works_for_others",
    ),
    Mutant(
        "whoever waits goes back in its last library alone",
        "    if (here.enter && here.enter != calls->enter) go_back();\n",
        "",
        "goes_back_in_each_library",
    ),
    Mutant("the mode stays as it was", "    int status = relax(calls);\n", "    int status = 0;\n", "moves_by_one_thread"),
    Mutant(
        "the mode is exchanged each time",
        "if (!calls->capture_mode || here.capture_mode == calls->capture_mode)",
        "if (!calls->capture_mode)",
        "moves_by_one_thread",
    ),
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
        "a chunk is given away whose event has failed",
        "            lose(c);\n",
        "            if (asked_for[n]) give_back(c);\n            else lose(c);\n",
        "tells_what_an_event_says",
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
    Mutant(
        "a chunk that was lost is given again",
        "there && there->state == LOST ? XE_BUSY : XE_OK",
        "XE_OK",
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
    Mutant(
        "the source is free while it is read",
        "return j->filling == 0 && all_started(j);",
        "return all_started(j);",
        "frees_its_source",
        "threads",
    ),
    Mutant(
        "the source is free before all parts have begun",
        "j->filling == 0 && all_started(j);",
        "j->filling == 0 && j->started;",
        "frees_its_source",
    ),
    Mutant("a job has finished while a chunk is out", "!j->finished && j->out == 0 &&", "!j->finished &&", "stands_a_rush"),
    Mutant(
        "what lands is not copied",
        "bool fresh = false, whole = copy_range(c, from, to, &fresh);",
        "bool fresh = false, whole = c->state == LANDING || copy_range(c, from, to, &fresh);",
        "moves_by_one_thread",
    ),
    Mutant(
        "a part is copied when its last slice has begun",
        "    if (--c->hands || c->begun < c->part_nbytes) return;\n",
        "    if (--c->hands, c->begun < c->part_nbytes) return;\n",
        "copies_together_to_the_device",
    ),
    Mutant(
        "a chunk is free when its last slice has begun",
        "    if (--c->hands || c->begun < c->part_nbytes) return;\n",
        "    if (--c->hands, c->begun < c->part_nbytes) return;\n",
        "copies_together_to_the_host",
    ),
    Mutant(
        "a part is copied when its first slice is",
        "    if (--c->hands || c->begun < c->part_nbytes) return;\n",
        "    if (--c->hands) return;\n",
        "moves_by_one_thread",
    ),
    Mutant(
        "one thread copies a part",
        "*nbytes = c->job->fresh ?",
        "*nbytes = true ? c->part_nbytes : c->job->fresh ?",
        "copies_together_to_the_device",
    ),
    Mutant(
        "slices are copied twice",
        "        size_t begin = s.at < from ? from : s.at,",
        "        size_t begin = s.at,",
        "copies_together_to_the_device",
    ),
    Mutant(
        "a slice ends with the part",
        "end = s.at + s.nbytes < to ? s.at + s.nbytes : to;",
        "end = s.at + s.nbytes;",
        "copies_together_to_the_device",
    ),
    Mutant(
        "a chunk comes back while others copy",
        "        } else if (c->hands) {\n            c->begun = c->part_nbytes;\n",
        "        } else if (false) {\n",
        "abandons_what_several_copy",
    ),
    Mutant(
        "more of what failed is copied",
        "            c->begun = c->part_nbytes;\n        } else {\n",
        "        } else {\n",
        "abandons_what_several_copy",
    ),
    Mutant(
        "chunks of two blocks are joined",
        "            if (each->block != block) continue;\n",
        "",
        "joins_no_blocks",
    ),
    Mutant("no chunks are joined", "    if (most > l->longest) most = l->longest;\n", "    most = 0;\n", "joins_chunks"),
    Mutant(
        "the first part is a large one",
        "    if (l->direction == XE_H2D && l->under_way < most) most = l->under_way;\n",
        "",
        "joins_chunks",
    ),
    Mutant(
        "what was on its way counts for ever",
        "    c->lane->under_way -= c->part_nbytes;\n",
        "",
        "joins_chunks",
    ),
    Mutant(
        "the last part is a large one",
        "    if (alone && j->left / 2 < most) most = j->left / 2;\n",
        "",
        "ends_small_where_nothing_follows",
    ),
    Mutant(
        "the last part to the device is a large one",
        "    if (alone && l->direction == XE_H2D && enqueued(l) >= j->left) alone = false;\n",
        "    if (l->direction == XE_H2D) alone = false;\n",
        "joins_chunks",
    ),
    Mutant(
        "the last parts are small, though the device has enough to do",
        "    if (alone && l->direction == XE_H2D && enqueued(l) >= j->left) alone = false;\n",
        "",
        "joins_chunks",
    ),
    Mutant(
        "what was joined stays so",
        "        if (now == FREE) put_aside(c);\n",
        "        if (now == FREE && c->state == FREE) put_aside(c), now = JOINED;\n",
        "joins_chunks",
    ),
    Mutant(
        "one of what was joined is lost",
        "    let_go(c, LOST);\n",
        "    if (c->joined) c->joined->job = j, j->out++, let_go(c->joined, FREE), c->joined = NULL;\n    let_go(c, LOST);\n",
        "loses_what_it_joined",
    ),
    Mutant(
        "what fits waits for longer runs",
        " && left > idle) return NULL;",
        ") return NULL;",
        "waits_for_longer_runs",
    ),
    Mutant(
        "parts become shorter and shorter",
        " && left > idle) return NULL;",
        " && left > idle && false) return NULL;",
        "waits_for_longer_runs",
    ),
    Mutant(
        "a chunk that was lost is counted on",
        "    measure(c->lane);\n    look_at(j);",
        "    look_at(j);",
        "waits_for_no_runs_that_are_lost",
    ),
    Mutant(
        "a chunk that was taken back is counted on",
        "        free(c);\n        measure(l);\n",
        "        free(c);\n",
        "fits_its_parts_to_its_chunks",
    ),
    Mutant(
        "a chunk that was taken back is behind another one",
        "        if (c->before) c->before->behind = NULL;\n",
        "",
        "fits_its_parts_to_its_chunks",
        "addresses",
    ),
    Mutant(
        "a chunk that was taken back is before another one",
        "        if (c->behind) c->behind->before = NULL;\n",
        "",
        "fits_its_parts_to_its_chunks",
        "addresses",
    ),
    Mutant(
        "a chunk is joined with those before it alone",
        "            if (c->memory + nbytes == each->memory) (c->behind = each)->before = c;\n",
        "",
        "fits_its_parts_to_its_chunks",
    ),
    Mutant(
        "a part is as long as a share of the memory",
        "    if (most > MOST_PART) most = MOST_PART;\n",
        "",
        "makes_no_part_too_long",
    ),
    Mutant(
        "a part ends within a chunk",
        "most / chunk_nbytes * chunk_nbytes",
        "most",
        "cuts_at_whole_chunks",
    ),
    Mutant(
        "what fits into a chunk is small",
        "    size_t least = SMALL_JOB;",
        "    size_t least = SIZE_MAX;",
        "is_fair_before_there_are_chunks",
    ),
    Mutant(
        "what has begun counts as to be begun",
        "j->left -= j->pieces[j->piece].nbytes - j->offset;",
        "{}",
        "waits_for_longer_runs",
    ),
    Mutant(
        "a slice that was cut off counts as read while others copy",
        "    if (!whole) fail(j, SIGBUS,",
        "    if (!whole && c->hands == 1) fail(j, SIGBUS,",
        "fails_while_others_copy",
    ),
    Mutant(
        "a job ends in short parts though others follow",
        " && !j->next;",
        ";",
        "ends_small_where_nothing_follows",
    ),
    Mutant(
        "runs are cut anywhere",
        "        if (c->before && c->before->state == FREE) continue;\n",
        "",
        "leaves_longer_runs",
    ),
    Mutant(
        "longer runs are waited for while little is on its way",
        " && l->under_way >= l->nbytes / 2 &&",
        " &&",
        "waits_where_half_is_on_its_way",
    ),
    Mutant(
        "nobody begins behind what has failed",
        "    wake(can_begin(j->lane));\n",
        "",
        "leaves_short_runs_to_others",
    ),
    Mutant(
        "runs are waited for that are lost",
        "    wake(can_begin(c->lane));\n",
        "",
        "waits_for_no_runs_that_are_lost",
    ),
    Mutant(
        "small jobs wait with a large one for longer runs",
        "l->large_next ? 0 : j->left",
        "j->left",
        "waits_for_longer_runs_alone",
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
    # Jobs that are abandoned.
    Mutant(
        "what is held is not at rest",
        "        if (has_failed(j)) return true;\n",
        "",
        "abandons_to_the_host",
    ),
    Mutant(
        "what failed is at rest while it is read",
        "if (has_failed(j) && (j->touched || j->calling)) return false;",
        "if (has_failed(j) && j->calling) return false;",
        "rests_behind_a_copy_to_the_device",
    ),
    Mutant(
        "what failed is at rest while it is written",
        "if (has_failed(j) && (j->touched || j->calling)) return false;",
        "if (has_failed(j) && j->calling) return false;",
        "rests_behind_a_copy_to_the_host",
    ),
    Mutant(
        "what was abandoned lands",
        "c->lane->direction == XE_H2D || has_failed(c->job)",
        "c->lane->direction == XE_H2D",
        "abandons_to_the_host",
    ),
    Mutant(
        "what had landed stays so",
        "    clear(&uncopied, j);\n",
        "",
        "abandons_what_has_landed",
    ),
    Mutant(
        "what is ready stays so",
        "    clear(&j->lane->ready, j);\n",
        "",
        "abandons_what_is_ready_to_the_device",
    ),
    Mutant(
        "others' chunks are given back",
        "        if (c->job != j) {",
        "        if (c->job == NULL) {",
        "leaves_others_their_chunks",
    ),
    Mutant(
        "chunks come back and nobody is told",
        "    wake(can_begin(j->lane));\n",
        "",
        "leaves_others_their_chunks",
    ),
    Mutant(
        "what was issued is not, when it is abandoned",
        "return j->finished || j->last_issued;",
        "return j->finished || (j->last_issued && !has_failed(j));",
        "abandons_to_the_device",
    ),
    Mutant("what has finished is abandoned", "if (j && !j->finished) fail(", "if (j) fail(", "abandons_to_the_device"),
    Mutant(
        "the event of what was abandoned is recorded",
        "all_started(j) && !has_failed(j); }",
        "all_started(j); }",
        "abandons_during_its_last_copy",
    ),
    Mutant(
        "what was abandoned is at rest while its device is called",
        "if (has_failed(j) && (j->touched || j->calling)) return false;",
        "if (has_failed(j) && j->touched) return false;",
        "rests_behind_a_call_to_the_device",
    ),
    Mutant(
        "nobody notes that a device is called",
        "        j->calling++;\n        bool",
        "        bool",
        "rests_behind_a_call_to_the_host",
    ),
    Mutant(
        "what was abandoned is at rest before its owner has answered",
        "    c->state = ISSUING;\n    j->calling++;\n    bool",
        "    c->state = ISSUING;\n    bool",
        "abandons_what_its_owner_copies",
    ),
    Mutant(
        "another chunk is taken back than was asked for",
        "        while (*place != c) place = &(*place)->next;\n        *place = c->next;\n    }\n",
        "        c = *place;\n        *place = c->next;\n    }\n",
        "takes_back_by_number",
    ),
    Mutant(
        "a chunk in use is taken back",
        "c && c->state == FREE && !wants_chunks(l), lost",
        "c && !wants_chunks(l), lost",
        "takes_back_by_number",
    ),
    Mutant(
        "what was taken back is waited for",
        "return !c ? XE_UNKNOWN : idle",
        "return !c ? XE_NOT_YET : idle",
        "takes_back_by_number",
    ),
    Mutant(
        "a chunk that was taken back is the lane's",
        "        while (*place != c) place = &(*place)->other;\n        *place = c->other;\n",
        "        (void)place;\n",
        "takes_back_by_number",
        "addresses",
    ),
    Mutant(
        "chunks that are wanted are taken back",
        "c->state == FREE && !wants_chunks(l), lost",
        "c->state == FREE, lost",
        "leaves_chunks_to_jobs_that_want_them",
    ),
    Mutant(
        "a chunk that was lost stays the lane's",
        "    if (idle || lost) {\n",
        "    if (idle) {\n",
        "gives_away_no_chunk_that_may_be_read",
    ),
    # Failures.
    Mutant("a failed call is not told", "    if (o.at) fail(j, o.status, o.at);\n", "", "fails_alone_to_the_host"),
    Mutant(
        "a failed event counts as reached",
        "        if (statuses[n] == 0) {\n",
        "        if (asked_for[n]) {\n",
        "tells_what_an_event_says",
    ),
    Mutant(
        "what failed by its owner's word counts as reached",
        '        if (status != 0) fail(c->job, status, "copying");\n',
        "",
        "tells_what_its_owner_says",
    ),
    Mutant(
        "a failed job goes on",
        "    unqueue(j);\n    clear(",
        "    clear(",
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
        "    if (!whole) fail(j, SIGBUS,",
        "    if (false) fail(j, SIGBUS,",
        "survives_a_file_that_is_cut_off",
    ),
    Mutant(
        "a file is read through its mapping",
        "if (to_device && is_of_file(c->job, host, &offset)) whole",
        "if (to_device && !c && is_of_file(c->job, host, &offset)) whole",
        "reads_a_file",
    ),
    Mutant(
        "all memory of a job is a file's",
        "j->file.descriptor >= 0 && *offset >= 0 && (uint64_t)*offset < j->file.nbytes;",
        "j->file.descriptor >= 0;",
        "reads_a_file",
    ),
    Mutant("a file is read from its start", "(int64_t)((uintptr_t)host - (uintptr_t)j->file.memory);", "0;", "reads_a_file"),
    Mutant(
        "a file is closed under those who read it",
        "fcntl(file->descriptor, F_DUPFD_CLOEXEC, 0)",
        "file->descriptor",
        "reads_a_file",
    ),
    Mutant("a file stays open until its job is forgotten", "    let_go_of_file(j);\n", "", "reads_a_file"),
    Mutant(
        "a file of which nothing was read stays open", "if (j->file.descriptor >= 0) close(j->file.descriptor);", "", "reads_a_file"
    ),
    Mutant(
        "a file is closed at its first part",
        "if (descriptor < 0 || more) return;",
        "if (descriptor < 0) return;",
        "reads_a_file",
    ),
    Mutant(
        "memory directly behind a file is the file's",
        "(uint64_t)*offset < j->file.nbytes;",
        "(uint64_t)*offset <= j->file.nbytes;",
        "reads_a_file_bit_by_bit",
    ),
    Mutant("a file is closed twice", "    j->file.descriptor = -1;\n", "", "reads_a_file_bit_by_bit"),
    Mutant(
        "a read that is interrupted fails",
        "        if (found < 0 && errno == EINTR) continue;\n",
        "",
        "reads_a_file_bit_by_bit",
        file="copying.c",
    ),
    Mutant("a read that is cut short begins anew", "        offset += found;\n", "", "reads_a_file_bit_by_bit", file="copying.c"),
    Mutant(
        "a read that is cut short is not gone on with",
        "        nbytes -= (size_t)found;\n",
        "        nbytes = 0;\n",
        "reads_a_file_bit_by_bit",
        file="copying.c",
    ),
    Mutant(
        "a file is closed while parts of it are being read",
        "j->filling > 0 || !all_started(j);",
        "!all_started(j);",
        "closes_no_file_that_is_read",
    ),
    Mutant(
        "what a file does not have counts as read",
        "        if (found <= 0) return false;\n",
        "        if (found <= 0) return true;\n",
        "reads_no_more_than_a_file_has",
        file="copying.c",
    ),
    Mutant(
        "a file that is cut off ends the process",
        "    if (guarded && !sent) {\n",
        "    if (guarded && number == 0) {\n",
        "survives_a_file_that_is_cut_off",
        "plain",
        "copying.c",
    ),
    Mutant(
        "a signal that was sent counts as a file that is cut off",
        "    if (guarded && !sent) {\n",
        "    if (guarded) {\n",
        "ends_by_a_signal_that_was_sent",
        "plain",
        "copying.c",
    ),
    Mutant(
        "a signal that was sent is swallowed",
        "        if (sent) raise(number);\n",
        "",
        "ends_by_a_signal_that_was_sent",
        "plain",
        "copying.c",
    ),
    Mutant(
        "a signal that is ignored ends the process",
        "before.sa_handler == SIG_IGN && sent",
        "before.sa_handler == SIG_IGN && sent && number == 0",
        "ends_by_a_signal_that_was_sent",
        "plain",
        "copying.c",
    ),
    Mutant(
        "nobody else is told of a signal that was sent",
        "        before.sa_handler(number);\n",
        "",
        "ends_by_a_signal_that_was_sent",
        "plain",
        "copying.c",
    ),
    # Threads.
    Mutant(
        "whoever waits is not woken",
        "        pthread_cond_broadcast(&news);\n    }\n    j->come = come;\n",
        "    }\n    j->come = come;\n",
        "wakes_whoever_waits_to_the_device",
    ),
    Mutant(
        "whoever waits is woken at the end alone",
        "        pthread_cond_broadcast(&news);\n    }\n    j->come = come;\n",
        "        if (j->finished) pthread_cond_broadcast(&news);\n    }\n    j->come = come;\n",
        "wakes_whoever_waits_to_the_host",
    ),
    Mutant(
        "whoever waits is woken at the first stage alone",
        "        pthread_cond_broadcast(&news);\n    }\n    j->come = come;\n",
        "        if (j->come == 0) pthread_cond_broadcast(&news);\n    }\n    j->come = come;\n",
        "wakes_whoever_waits_to_the_device",
    ),
    Mutant(
        "what had come before a failure counts behind it",
        "    j->come = come;\n",
        "    if (come > j->come) j->come = come;\n",
        "wakes_whoever_waits_for_what_failed",
    ),
    Mutant(
        "a thread that looks for work never sleeps",
        STAYS_AWAKE,
        STAYS_AWAKE.replace("if (!spares_cores) return false;", "").replace("&& since(&began) < microseconds", "&& !stopping"),
        "falls_asleep",
    ),
    Mutant(
        "a thread that has looked for work does so again",
        STAYS_AWAKE,
        STAYS_AWAKE.replace("if (!spares_cores) return false;", "").replace("more(seen);\n", "true;\n"),
        "falls_asleep",
    ),
    Mutant(
        "a thread falls asleep on what it was told meanwhile",
        STAYS_AWAKE,
        STAYS_AWAKE.replace("if (!spares_cores) return false;", "").replace(
            "return come || stopping || more(seen)", "return stopping"
        ),
        "misses_nothing_as_it_falls_asleep",
    ),
    Mutant(
        "a thread that looks for work is never called",
        STAYS_AWAKE,
        STAYS_AWAKE.replace("if (!spares_cores) return false;", "").replace("return left > 0", "return left > 1000"),
        "misses_nothing_as_it_falls_asleep",
    ),
    Mutant(
        "who is called once is called for good",
        STAYS_AWAKE,
        STAYS_AWAKE.replace("if (!spares_cores) return false;", "").replace("left - 1", "left"),
        "falls_asleep",
    ),
    # Where there is one CPU, they run there in any case.
    *(
        Mutant(name, old, new, "stands_near_a_device")
        for name, old, new in (
            ("threads of a node run anywhere", "pthread_create(&thread, where, run", "pthread_create(&thread, NULL, run"),
            ("threads of a node run where whoever asks for them does", "&near[node], &where);", "&near[node], NULL);"),
        )
        if len(os.sched_getaffinity(0)) > 1
    ),
    Mutant(
        "threads of a node are started whenever they are asked for",
        "        if (started != &threads) ++*started;\n",
        "",
        "stands_near_a_device",
    ),
    Mutant(
        "threads of one node are another's",
        "start(wanted, &near[node], &where)",
        "start(wanted, &near[0], &where)",
        "stands_near_a_device",
    ),
    Mutant(
        "threads of a node are those that there are",
        "start(wanted, &near[node], &where)",
        "start(wanted, &threads, &where)",
        "stands_near_a_device",
    ),
    Mutant(
        "where CPUs are refused there is no thread",
        "        if (refused && where) refused = pthread_create(&thread, NULL, run, NULL);\n",
        "",
        "stands_near_a_device",
    ),
    Mutant("threads have no name", '"xferlib-engine");', '"xferlib");', "stands_near_a_device"),
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
        "            worked = worked || done;\n",
        "",
        "leaves_what_it_began_before_there_were_threads",
    ),
    Mutant(
        "whoever waits only waits",
        "if (threads && help(j)) {",
        "if (threads && has_failed(j) && help(j)) {",
        "works_while_it_waits_to_the_device",
    ),
    Mutant(
        "whoever waits copies as the threads do",
        "j->small || 2 * hands < (size_t)threads;",
        "true;",
        "leaves_large_jobs_to_threads_that_copy",
    ),
    Mutant(
        "whoever waits copies nothing of small jobs either where threads copy",
        "j->small || 2 * hands < (size_t)threads;",
        "2 * hands < (size_t)threads;",
        "leaves_large_jobs_to_threads_that_copy",
    ),
    Mutant(
        "whoever waits copies until all threads do",
        "j->small || 2 * hands < (size_t)threads;",
        "j->small || hands < (size_t)threads;",
        "copies_where_fewer_than_half_do",
    ),
    Mutant(
        "whoever waits begins parts of large jobs all the same",
        "if (copies && (c = start_part(l))) {",
        "if ((c = start_part(l))) {",
        "leaves_large_jobs_to_threads_that_copy",
    ),
    Mutant(
        "whoever waits goes on with parts of large jobs all the same",
        "    if (c && copies) {\n",
        "    if (c) {\n",
        "leaves_large_jobs_to_threads_that_copy",
    ),
    Mutant(
        "whoever waits relies on threads for good",
        "unasked || relied ? LONGEST_SLEEP",
        "unasked ? LONGEST_SLEEP",
        "copies_what_threads_leave",
    ),
    Mutant(
        "whoever waits relies for good on exactly half of the threads",
        "relied = 2 * hands >= (size_t)threads;",
        "relied = 2 * hands > (size_t)threads;",
        "copies_what_threads_leave",
    ),
    Mutant(
        "who could not copy is counted on",
        "    hands--;\n",
        "    hands -= whole;\n",
        "works_for_others_after_a_file_was_cut_off",
    ),
    Mutant(
        "who has copied is counted on",
        "    hands--;\n",
        "",
        "works_while_it_waits_to_the_device",
    ),
    Mutant(
        "whoever waits lands nothing",
        "    if (c && copies) {\n",
        "    if (false) {\n",
        "works_while_it_waits_to_the_host",
    ),
    Mutant(
        "whoever waits asks for nothing",
        "    if (polling || copying == 0) return false;\n    polling = true;\n    size_t found = ask(), mine = 0;",
        "    if (polling || copying < SIZE_MAX) return false;\n    polling = true;\n    size_t found = ask(), mine = 0;",
        "works_while_it_waits_to_the_device",
    ),
    Mutant(
        "what whoever waits has begun is left to nobody",
        "    if (worked || (has_asked && copying && !polling)) wake(1);\n",
        "    if (has_asked && copying && !polling) wake(1);\n",
        "leaves_what_it_began",
    ),
    Mutant(
        "what whoever waits has asked for is left to nobody",
        "    if (worked || (has_asked && copying && !polling)) wake(1);\n",
        "    if (worked) wake(1);\n",
        "leaves_what_it_asks_for",
    ),
    Mutant(
        "whoever only asks does nothing",
        "        if (threads == 0) {\n",
        "        if (threads == 0 && left > 0) {\n",
        "does_what_can_be_done_at_once",
    ),
    Mutant(
        "whoever only asks finishes it all",
        "(left > 0 || questions-- > 0)",
        "(left > 0 || questions > 0)",
        "does_what_can_be_done_at_once",
    ),
    Mutant(
        "nobody asks during a call",
        "    touching++;\n    if (copying && !polling) wake(1);\n",
        "    touching++;\n",
        "waits_for_no_call",
    ),
    Mutant(
        "a call is forgotten when it is stopped",
        "        leave();\n        outcome o = issue(c, first);\n        come_back();\n",
        "        pthread_mutex_unlock(&mu);\n        outcome o = issue(c, first);\n        pthread_mutex_lock(&mu);\n",
        "stops_behind_a_call",
    ),
    Mutant("it asks when nothing is in flight", "        copying--;\n", "", "costs_little_while_held"),
    Mutant(
        "what is copied is forgotten when it is stopped",
        "copy_range(c, from, to, &fresh);\n    come_back();\n",
        "(lock(), touching--, pthread_mutex_unlock(&mu), copy_range(c, from, to, &fresh));\n    lock();\n",
        "stops_behind_a_copy",
    ),
    Mutant(
        "whoever owns a lane is not told what is filled",
        "    look_at(j);\n    if (!c->lane->calls) pthread_cond_signal(&asked);\n",
        "    look_at(j);\n",
        "wakes_whoever_owns_a_lane",
    ),
    Mutant(
        "whoever owns a lane is not told what there is to get",
        "    push(&c->lane->ready, c);\n    if (!c->lane->calls) pthread_cond_signal(&asked);\n",
        "    push(&c->lane->ready, c);\n",
        "wakes_whoever_owns_a_lane",
    ),
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
    # Huge pages.
    *(
        Mutant(name, old, new, TOUCHED_IN_HUGE_PAGES, "plain", "copying.c")
        for name, old, new in (
            ("there are small pages alone", "madvise(border, HUGE_PAGE, COLLAPSE);", "{}"),
            ("no page is there", "madvise((void *)(last & -(uintptr_t)PAGE), PAGE, POPULATE_WRITE)", "last == 0"),
            ("what lies before is touched", "border < around->first || within", "within"),
            ("of the last one little is needed", "within < HUGE_PAGE - HUGE_PAGE / 4", "within < 1"),
            ("of the last one all is needed", "within < HUGE_PAGE - HUGE_PAGE / 4", "within < HUGE_PAGE"),
            ("the rest has no pages", "        while (madvise(memory + at, part, POPULATE_WRITE)) {", "        while (false) {"),
        )
    ),
    Mutant(
        "nobody looks where a file ends",
        "(within < HUGE_PAGE ? within : HUGE_PAGE) - 1",
        "0",
        ENDS_IN_A_HUGE_PAGE,
        "plain",
        "copying.c",
    ),
    Mutant("results come in small pages", "+= HUGE_PAGE) fetch_huge(border, around);", "+= HUGE_PAGE) {}", *IN_COPYING),
    Mutant("slices end anywhere", "    if (j->fresh) nbytes = to_border(c, c->begun);\n", "", WRITTEN_IN_HUGE_PAGES),
    Mutant("parts end anywhere", "j->fresh && w.offset ?", "false ?", "ends_parts_at_huge_pages"),
    Mutant("all parts end at huge pages", "j->fresh && w.offset ?", "w.offset ?", "ends_parts_at_huge_pages"),
    Mutant("nobody looks whether memory is there", "j->fresh = fresh && l->direction == XE_D2H;", "", "ends_parts_at_huge_pages"),
    Mutant("what is found to be fresh is forgotten", "    j->fresh |= fresh;\n", "", WRITTEN_IN_HUGE_PAGES),
    Mutant("a piece is taken for its segment", "{p->host, p->nbytes}", "{host, end - begin}", WRITTEN_IN_HUGE_PAGES),
    *(
        Mutant(name, old, new, "gathers_in_order", "plain", "copying.c")
        for name, old, new in (
            ("an axis is begun where it ended", "            from -= (counts[axis] - 1) * steps[axis];\n", ""),
            ("an axis is begun in the middle", "            index[axis] = 0;\n", ""),
            ("any two axes are one", "last < 0 || steps[last] != shape[axis] * strides[axis]", "last < 0"),
            ("what lies apart is copied in one", "steps[last] == (int64_t)run", "steps[last] >= (int64_t)run"),
            ("items of four bytes are items of eight", "        RUNS(4);\n", "    case 4:\n"),
            ("nothing is read as something", "        if (!shape[axis]) return true;\n", "        (void)axis;\n"),
        )
    ),
    *(
        Mutant(name, old, new, "gathers_from_a_file_that_is_cut_off", "plain", "copying.c")
        for name, old, new in (
            ("a strided source that was cut off ends the process", "    guarded = 1;\n    // Moves", "    // Moves"),
            ("behind a strided source all is survived", "    atomic_signal_fence(memory_order_seq_cst);\n    guarded = 0;\n", ""),
            ("behind one that was cut off all is survived", "        guarded = 0;\n        siglongjmp", "        siglongjmp"),
        )
    ),
    # Calls in a context.
    *(
        Mutant(
            f"whoever called {call.split('(')[0]} stays there",
            f"in->{call};\n    leave(in);\n",
            f"in->{call};\n",
            IN_PLACE,
            file=CONTEXT,
        )
        for call in ("copy_h2d(dst, src, nbytes, stream)", "copy_d2h(dst, src, nbytes, stream)", "record(event, stream)")
    ),
    Mutant(
        "whoever made a stream wait stays there",
        "wait(stream, event, 0);\n    leave(in);\n",
        "wait(stream, event, 0);\n",
        IN_PLACE,
        file=CONTEXT,
    ),
    Mutant(
        "whoever asked stays there",
        "in->capture_mode(&b->mode);\n    leave(in);\n",
        "in->capture_mode(&b->mode);\n",
        IN_PLACE,
        file=CONTEXT,
    ),
    Mutant(
        "whoever asked stays relaxed",
        "    if (!b->refused) in->capture_mode(&b->mode);\n",
        "    (void)b;\n",
        IN_PLACE,
        file=CONTEXT,
    ),
    Mutant(
        "whoever asked and was refused stays relaxed",
        "    status = question(handle);\n    leave_relaxed(in, &b);\n",
        "    status = question(handle);\n    status ? leave(in) : leave_relaxed(in, &b);\n",
        IN_PLACE,
        file=CONTEXT,
    ),
    Mutant("nobody who asks is relaxed", "b->mode = in->relaxed;", "b->mode = 1;", IN_PLACE, file=CONTEXT),
    Mutant(
        "a mode that was not exchanged is exchanged back",
        "if (!b->refused) in",
        "in",
        "asks_in_whatever_mode_it_gets",
        file=CONTEXT,
    ),
    Mutant(
        "nobody asks who is not relaxed",
        "status = question(handle);",
        "if (!b.refused) status = question(handle);",
        "asks_in_whatever_mode_it_gets",
        file=CONTEXT,
    ),
    Mutant("what was said is lost", "status = question(handle);", "question(handle);", IN_PLACE, file=CONTEXT),
    Mutant(
        "a stream is asked for as an event is",
        "ask(in, in->query_stream, stream)",
        "ask(in, in->query_event, stream)",
        IN_PLACE,
        file=CONTEXT,
    ),
    Mutant(
        "who cannot go there asks from where it is",
        "    if (status) return status;\n    b->mode",
        "    b->mode",
        NOT_THERE,
        file=CONTEXT,
    ),
    Mutant(
        "whoever asked about memory stays there",
        "in->pointer_attribute(found, attribute, address);\n    leave_relaxed(in, &b);\n",
        "in->pointer_attribute(found, attribute, address);\n",
        IN_PLACE,
        file=CONTEXT,
    ),
    Mutant(
        "who cannot go there copies from where it is",
        "    if (status) return status;\n    status = in->copy_h2d",
        "    status = in->copy_h2d",
        NOT_THERE,
        file=CONTEXT,
    ),
    Mutant(
        "a call goes on before the clerk has seen it",
        "    while (call->state != HANDLED && ",
        "    while (call->state == QUEUED && ",
        HANDED,
        "threads",
        file=CALLBACKS,
    ),
    Mutant("calls inside a call are told of", "if (depth++ == 0) is_told", "if (depth++ >= 0) is_told", HANDED, file=CALLBACKS),
    Mutant("the end of a call inside is the end of the call", "if (depth == 1 && is_told)", "if (is_told)", HANDED, file=CALLBACKS),
    Mutant(
        "a recording that ended inside a call spoils the next",
        "of_recording = recording, depth = 0;",
        "of_recording = recording;",
        HANDED,
        file=CALLBACKS,
    ),
    Mutant("the end of a call that nobody saw begin counts", "if (depth > 0) depth--;", "depth--;", HANDED, file=CALLBACKS),
    Mutant(
        "the end of a recording ends another",
        "    if (atomic_load(&running) == recording) {\n        atomic_store(&running, 0);",
        "    if (recording) {\n        atomic_store(&running, 0);",
        HANDED,
        file=CALLBACKS,
    ),
    Mutant(
        "the clerk's call is freed by its caller", "if (!is_clerks) free(call);", "free(call);", LATE, "addresses", file=CALLBACKS
    ),
    Mutant("a call that was left is freed by nobody", "    if (is_left) free(call);\n", "", LATE, "addresses", file=CALLBACKS),
    Mutant(
        "a call that went on stays in the queue",
        "    if (call->state == QUEUED && !is_clerks) unlink_call(call);\n",
        "",
        LATE,
        "addresses",
        file=CALLBACKS,
    ),
    Mutant(
        "what is pointed to is the caller's",
        "        words[0] = (uintptr_t)call->pointed;\n",
        "",
        LATE,
        "addresses",
        file=CALLBACKS,
    ),
    Mutant(
        "a batch is the caller's",
        "words[at] = (uintptr_t)&call->pointed[at];",
        "(void)at;",
        LATE,
        "addresses",
        file=CALLBACKS,
    ),
    Mutant(
        "a call that comes too late is not missed again",
        "    missed += is_left && !may_be_late(call) && atomic_load(&running) == call->recording;\n",
        "",
        LATE,
        file=CALLBACKS,
    ),
    Mutant(
        "the end of a call is told though its beginning was missed", "depth == 1 && is_told", "depth == 1", LATE, file=CALLBACKS
    ),
    Mutant(
        "whose order alone matters waits as long as others",
        "is_patient && SOON < longest ? SOON : longest",
        "longest",
        "keeps_callbacks_that_may_be_late",
        file=CALLBACKS,
    ),
    Mutant(
        "what may be late is missed",
        "missed += !done && !is_patient && runs;",
        "missed += !done && runs;",
        "keeps_callbacks_that_may_be_late",
        file=CALLBACKS,
    ),
    Mutant(
        "what is late is given up",
        "call->state == TAKEN || (call->state == QUEUED && is_patient && runs)",
        "call->state == TAKEN",
        "keeps_callbacks_that_may_be_late",
        file=CALLBACKS,
    ),
    Mutant(
        "what was left is freed by nobody as the recording ends",
        "            if (call->state == LEFT) unlink_call(call), free(call);\n",
        "            if (call->state == LEFT) unlink_call(call);\n",
        "keeps_callbacks_that_may_be_late",
        "addresses",
        file=CALLBACKS,
    ),
    Mutant(
        "nobody is told that the recording ends",
        "        pthread_cond_broadcast(&queued), pthread_cond_broadcast(&handled);\n",
        "",
        ENDED,
        file=CALLBACKS,
    ),
    Mutant(
        "a forked child records",
        "    atomic_store(&running, 0);\n    oldest = NULL",
        "    oldest = NULL",
        ENDED,
        file=CALLBACKS,
    ),
)
