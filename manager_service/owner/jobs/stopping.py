"""Decides whether training ends early: at a target, on a plateau, or without tokens.

Compares the newest evaluation if steps have any between them, else the mean of the last COMPARED_STEPS steps: of the reward,
or of a supervised job's loss with its sign turned, so that more is better.
"""

from manager_service.records.job_records import JobSpec, JobState, ScoreProgress, Stop

COMPARED_STEPS = 5
"""Steps whose mean is compared, because one step is noisy."""


def note_step(spec: JobSpec, state: JobState, *, ahead: int = 0) -> None:
    """Takes in the figures of the newest step. `ahead`: tokens that were sampled for later ones."""
    progress = state.progress
    progress.tokens = state.tokens - progress.eval_tokens
    progress.step_tokens = (progress.tokens - ahead) // state.version
    figure = _better(spec, state.last_loss if spec.is_supervised else state.last_reward)
    if figure is None or _compares_evaluations(spec):
        return
    progress.recent = [*progress.recent, figure][-COMPARED_STEPS:]
    if len(progress.recent) == COMPARED_STEPS:
        _note(spec, progress, state.version, sum(progress.recent) / COMPARED_STEPS)


def note_evaluation(spec: JobSpec, state: JobState, version: int, figure: float | None) -> None:
    """Takes in an evaluation's mean reward or loss; None: nothing of it could be measured."""
    state.evaluated = max(version, state.evaluated)
    score = _better(spec, figure)
    if score is not None and _compares_evaluations(spec):
        _note(spec, state.progress, version, score)


def _compares_evaluations(spec: JobSpec) -> bool:
    return bool(spec.num_eval_items and spec.hyper.eval_interval)


def _better(spec: JobSpec, figure: float | None) -> float | None:
    return -figure if figure is not None and spec.is_supervised else figure


def _note(spec: JobSpec, progress: ScoreProgress, step: int, score: float) -> None:
    progress.score, progress.step = score, step
    if progress.best is None or score > progress.best + spec.hyper.plateau_delta:
        progress.best, progress.best_step = score, step


def end_of(spec: JobSpec, state: JobState, steps_sent: int) -> tuple[Stop, str] | None:
    """The end of training, with its reason in words; None: it goes on. `steps_sent`: the version sure to come."""
    hyper, progress, version = spec.hyper, state.progress, state.version
    limit = hyper.max_tokens_total
    if state.stop is not None or steps_sent >= hyper.num_steps:
        return None
    if limit is not None and state.tokens >= limit:
        return Stop(steps_sent, "max_tokens_total"), f"it has used {state.tokens} of {limit} tokens"
    if version < 1:
        return None
    a_step = progress.step_tokens
    if limit is not None and progress.tokens + progress.eval_tokens + a_step > limit:
        used = f"it has used {state.tokens} of {limit} tokens, and a step takes about {a_step}"
        return Stop(steps_sent, "max_tokens_total"), used
    if progress.score is None or progress.best is None or progress.step < 1:
        return None
    if hyper.target_reward is not None and progress.score >= hyper.target_reward:
        reached = f"{_named(spec)} is {progress.score:.4g}, and target_reward {hyper.target_reward:g}"
        return Stop(steps_sent, "target_reward"), reached
    since = progress.step - progress.best_step
    if hyper.plateau_steps is not None and since >= hyper.plateau_steps:
        best = f"{abs(progress.best) if spec.is_supervised else progress.best:.4g} at step {progress.best_step}"
        return Stop(steps_sent, "plateau"), f"for {since} steps {_named(spec)} has not become better than {best}"
    return None


def _named(spec: JobSpec) -> str:
    figure = "loss" if spec.is_supervised else "mean reward"
    return (
        f"the evaluation's {figure}"
        if _compares_evaluations(spec)
        else f"the {figure} of the last {COMPARED_STEPS} steps"
    )
