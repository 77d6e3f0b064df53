"""Trains LoRA adapters: Init and TrainStep (a batch) come in, the next version goes to the store and an AdapterUpdate goes out.

    train ─ TrainStep ─► handler ─► fusion: many jobs' steps at once ─► training ─► losses ─► optimiser ─► store ─► AdapterUpdate
    train, train:<worker> ─ Operations ─► run_handler ─► (the same) ─► OperationsDone, a gradient that is kept

To add a loss of jobs: a name in `LossName` (`common/wire/messages.py`), a row in `ADVANTAGES` (`common/tasks/advantages.py`)
and one in `RULES` (losses.py: ratio, clip, mean); see CONTRIBUTING.md. To add a loss of runs: a name in `LossFn`
(`common/wire/operations.py`), a row in `RUN_RULES` (data.py) and in `NEEDED`
(`manager_service/http/tinker/wire/learning.py`), and its formula in tests/trainer/test_run_losses.py.

    __main__.py     starts one trainer worker
    settings.py     reads the settings of one trainer worker
    handler.py      answers Init and TrainStep; makes each version once
    run_handler.py  answers Operations of runs; keeps their gradients
    versions.py     reads and commits versions; keeps the last states
    fusion.py       chooses who computes a step: the main driver, or the express one for small steps
    driver.py       lets steps of many jobs join, leave and fail one by one, in one thread
    training.py     runs steps of many jobs micro-batch by micro-batch
    open_step.py    holds one adapter's batch while it is under way
    lagged.py       measures how far engine and trainer differ in rows of older versions
    run_step.py     carries out a segment of a run's operations
    batch.py        holds a batch, and parses a job's rows
    data.py         parses the data of a run's operations; the losses of runs, with their defaults
    packing.py      packs rows into sequences and micro-batches
    backbone/       computes log-probs of the trained tokens under each adapter
    ranks/          several processes of one trainer, each with a part of the base model
    lora.py         holds the trainable factors of many adapters side by side
    losses.py       computes all losses by one formula; ratios, clips and means of the losses of jobs
    optimiser.py    runs AdamW over one flat tensor
    memory.py       measures how much memory a micro-batch takes
    selftest.py     checks on this machine what deterministic mode relies on
"""
