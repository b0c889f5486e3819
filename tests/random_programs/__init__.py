"""Random programs: one seed, one program over the whole public face, checked by a model that knows every byte.

    python -m tests.random_programs --backend host --minutes 5 --seed 1
    python -m tests.random_programs --backend driven --large         # those of large arrays
    python -m tests.random_programs --seed 1 --program 217           # one program of a seed again, printed, and made short
    python -m tests.random_programs --replay FILE                    # one that was kept
    python -m tests.mutants.planted --backend host             # how soon planted defects are found

`--backend` is host, driven (a device of C), jax, cupy or numba. On a GPU they need a checkout, the installed package, pytest and
`cuda-bindings`; JAX takes a GPU with `--gpu`. A failure is printed with its program made as short as it still fails, `--save
FOLDER` keeps that, `--keep-going` goes on and counts failures that look alike, `--json FILE` writes the figures.

What is covered: trees of one to 600 leaves of every dtype and layout, whose sizes lie at the boundaries in the code; pinned memory
and views of it, pageable, read-only, mapped from files, page-locked in place, borrowed; `into=` and `out=`; streams, named, current
and held; `value`, `value_on`, `result`, `done`, `stream_wait`; several stagers, and devices where there are several; slots of rings
that other stagers read and write; mapped views; `prefetch`, `stream_map`, `drain`; `load`; things dropped in any order and in
reference cycles, with and without finalizers, some of which bring all of it back, while the collector runs as often as every fifth
allocation; `trim`, limits, `close` while arrays live on; copies and compute that are held; threads. Not covered: worker processes
(`SharedRing`), forks, interrupts, failing copies, JAX's shardings and donation, graphs.

Programs of large arrays (`--large`) are drawn from the same steps. They have two stagers with limits, and arrays of 8 bytes to
40 MiB, on a GPU 256 MiB, so that transfers take more chunks than there are, pools grow and are full, and much memory is locked
late. Most of each is on three threads. They take several times as long.

What is checked: every byte that a transfer or a loop gives, past the stager and by it; that `done()` says yes only to what is
there; readers on the device that are behind held work; canaries, memory of others beside ours; on host and on JAX's CPU a
driver as strict as a GPU's, whose freed memory is poisoned (`driver`); that nobody uses what malloc was given back; that
nothing hangs or crashes, that nothing is raised in finalizers and on threads; that no stager has more memory than its limits;
and that when all is dropped no memory and no thread is left. The model follows the documented rules: it rewrites a pinned
source only when `done()` says so, and keeps what a stream reads that nobody named.

How it is made: a program is drawn as data before any of it runs (`draw`, `sketch`, `sizes`), so that steps can be left out of one
that fails (`shrink`); a step whose things are missing is skipped. One process runs programs (`worker`, `run`), another has them
run (`supervise`), so that a crash or a hang is a failure with a traceback like any other. What is held is released as soon as a
step has been blocked for some milliseconds (`release`): it may wait for just that.

To add a kind of step: a subclass of `Kind` in a module of `kinds`, listed in its `ALL`. `draw` returns the step, with arguments
that are JSON, and notes in the sketch what it makes; `run` does it and keeps the records of `world` true. `refusable` is for what
a limit may refuse.

What failed once is kept: `failed_seeds.txt` has a line for each (backend, seed, number), and `regressions/` programs that were made
short, by the backends in their name. Both are run by `test_random_programs`, with seeds by date.
"""
