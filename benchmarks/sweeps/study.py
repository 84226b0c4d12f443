"""An Optuna study that several processes have trials of, or several machines with one folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from random import Random

import optuna
from filelock import FileLock
from optuna.distributions import BaseDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, Trial, TrialState

from gradfree.benchmarks.records.records import RecordFile
from gradfree.benchmarks.running.runner import RECORDS
from gradfree.cli import UsageError

_JOURNAL = "study.journal"
_SHARE = "share"
_ERROR = "error"


class SharedStudy:
    """A study as one of its processes has it.

    Args:
        folder: has the journal, and a file of records of each process.
        name: of the study; a journal may have several.
        higher_is_better: whether higher values are.
        share: tells this process's file from the others'; it must be reserved for as long as the process lives.
    """

    def __init__(self, folder: Path, name: str, higher_is_better: bool, share: str):
        self.records = _records(folder, share)
        self._folder = folder
        self._share = share
        self._lock = FileLock(folder / f".{_JOURNAL}.claims.lock")
        self._study = _open(folder / _JOURNAL, name, higher_is_better)

    def ask(self, ranges: dict[str, BaseDistribution], trials: int, seed: int) -> Trial | None:
        """Return a new trial; ``None`` where there are as many as ``trials``."""
        with self._lock:
            for trial in self._study.get_trials(states=(TrialState.RUNNING,)):
                if self._is_abandoned(trial):
                    self._study.tell(trial.number, state=TrialState.FAIL)
            number = len(self.counted())
            if number >= trials:
                return None
            # A sampler for each trial: processes do not repeat each other, and one that was killed goes on as it would.
            self._study.sampler = optuna.samplers.TPESampler(seed=Random(f"{seed} {number}").getrandbits(32))
            asked = self._study.ask(ranges)
            asked.set_user_attr(_SHARE, self._share)
            return asked

    def tell(self, trial: Trial, value: float) -> None:
        """Finish a trial."""
        self._study.tell(trial, value)

    def fail(self, trial: Trial, error: str) -> None:
        """Finish a trial that has no value."""
        trial.set_user_attr(_ERROR, error)
        self._study.tell(trial, state=TrialState.FAIL)
        print(f"trial {trial.number} failed: {error}", flush=True)

    def counted(self) -> list[FrozenTrial]:
        """Return the trials but for those that were cut off: what has a value, failed, or is under way."""
        states = TrialState.COMPLETE, TrialState.RUNNING
        return [trial for trial in self._study.trials if trial.state in states or _ERROR in trial.user_attrs]

    def best(self) -> FrozenTrial:
        """Return the best trial.

        Raises:
            UsageError: none has a value.
        """
        try:
            return self._study.best_trial
        except ValueError:
            errors = [trial.user_attrs.get(_ERROR, "it is still under way") for trial in self.counted()]
            raise UsageError(f"no trial has a score. The last one: {errors[-1]}") from None

    def _is_abandoned(self, trial: FrozenTrial) -> bool:
        """Tell whether the process that had a trial is gone."""
        share = trial.user_attrs.get(_SHARE, self._share)
        if share == self._share:
            return True
        with suppress(UsageError), _records(self._folder, share).reserved():
            return True
        return False


@contextmanager
def joined(folder: Path, name: str, higher_is_better: bool) -> Iterator[SharedStudy]:
    """Take part in a study, under the first share that no other process has."""
    with ExitStack() as stack:
        for number in count(1):
            with suppress(UsageError):
                stack.enter_context(_records(folder, share := f"search-{number}").reserved())
                break
        yield SharedStudy(folder, name, higher_is_better, share)


def _records(folder: Path, share: str) -> RecordFile:
    return RecordFile(folder / RECORDS, share)


def _open(journal: Path, name: str, higher_is_better: bool) -> optuna.Study:
    # What the trials come to is said by the search.
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        storage = JournalStorage(JournalFileBackend(str(journal), JournalFileOpenLock(str(journal))))
        return optuna.create_study(
            storage=storage,
            study_name=name,
            direction="maximize" if higher_is_better else "minimize",
            load_if_exists=True,
        )
    except ValueError as error:
        raise UsageError(
            f"{journal} cannot be read: {error}. Delete it: the records beside it stay, and what they have is not run "
            "again where the search comes by it."
        ) from error
