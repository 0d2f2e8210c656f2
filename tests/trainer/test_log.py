"""`self.log`: names, levels, reductions, loaders, refusals; and that nothing is read before it must be."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import hasten
from hasten import HastenError
from hasten.callbacks import Callback
from tests.trainer.flags.trained import Remembering
from tests.trainer.trainings import quiet


class Logging(hasten.Module):
    """Logs given values in given hooks: `where` has for each hook the arguments of the calls of `self.log`."""

    def __init__(self, **where):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        for name, calls in where.items():
            self.__dict__[name] = self._logs(calls, getattr(self, name))

    def _logs(self, calls, then):
        def hook(*args, **kwargs):
            for name, value, how in calls:
                self.log(name, value(args) if callable(value) else value, **how)
            return then(*args, **kwargs)

        return hook

    def training_step(self, batch, batch_idx):
        return self.net(batch[:, None]).mean()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        pass

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def numbers(count=5, batch_size=2):
    return DataLoader(torch.arange(float(count)), batch_size=batch_size)


def the_mean(args):
    return args[0].mean()


def fitted(*calls, hook="training_step", validation=None, **flags):
    """A Trainer that trained while a hook logged."""
    trainer = quiet(**flags)
    trainer.fit(Logging(**{hook: calls}), numbers(), validation)
    return trainer


def values(metrics):
    return {name: pytest.approx(float(value)) for name, value in metrics.items()}


# -- names and levels --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "names"),
    [
        ({}, {"x": 4.0}),
        ({"on_step": True}, {"x": 4.0}),
        ({"on_step": False, "on_epoch": True}, {"x": 2.0}),
        ({"on_epoch": True}, {"x": 2.0, "x_step": 4.0, "x_epoch": 2.0}),
        ({"on_step": True, "on_epoch": True}, {"x": 2.0, "x_step": 4.0, "x_epoch": 2.0}),
    ],
)
def test_names_and_levels_in_training(how, names):
    trainer = fitted(("x", the_mean, how))
    assert values(trainer.callback_metrics) == names
    logged = {name: value for name, value in names.items() if name != "x" or len(names) == 1}
    assert values(trainer.logged_metrics) == logged
    assert trainer.progress_bar_metrics == {}
    trainer = fitted(("x", the_mean, {**how, "prog_bar": True}))
    assert trainer.progress_bar_metrics == {name: pytest.approx(value) for name, value in logged.items()}


def test_values_that_are_not_for_loggers():
    trainer = fitted(("x", the_mean, {"logger": False, "on_epoch": True}))
    assert trainer.logged_metrics == {}
    assert set(trainer.callback_metrics) == {"x", "x_step", "x_epoch"}


@pytest.mark.parametrize("fn", ["validate", "test"])
def test_names_and_levels_in_evaluation(fn):
    step = "validation_step" if fn == "validate" else "test_step"
    module = Logging(**{step: [("x", the_mean, {}), ("y", the_mean, {"on_step": True})]})
    trainer = quiet()
    results = getattr(trainer, fn)(module, numbers(), verbose=False)
    assert results == [{"x": 2.0, "y_epoch": 2.0}]
    assert values(trainer.callback_metrics) == {"x": 2.0, "y": 2.0, "y_epoch": 2.0}


@pytest.mark.parametrize(
    ("reduce_fx", "expected"),
    [("mean", 2.0), ("avg", 2.0), ("sum", 0.5 + 2.5 + 4), ("min", 0.5), ("max", 4.0), (torch.mean, 2.0),
     (torch.max, 4.0), (min, 0.5), (sum, 7.0), ("MEAN", 2.0)],
)  # fmt: skip
def test_reductions(reduce_fx, expected):
    how = {"on_step": False, "on_epoch": True, "reduce_fx": reduce_fx}
    assert float(fitted(("x", the_mean, how)).callback_metrics["x"]) == pytest.approx(expected)


def test_the_mean_is_weighted_by_batch_size():
    how = {"on_step": False, "on_epoch": True}
    trainer = fitted(
        ("first dimension", the_mean, how), ("given", the_mean, {**how, "batch_size": 1}),
        ("a number", 3, how), ("one element", lambda args: args[0].mean().reshape(1), how),
    )  # fmt: skip
    assert values(trainer.callback_metrics) == {
        "first dimension": 2.0, "given": (0.5 + 2.5 + 4) / 3, "a number": 3.0, "one element": 2.0,
    }  # fmt: skip


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.floats(-1e3, 1e3, width=32), st.integers(1, 64)), min_size=1, max_size=600),
    st.sampled_from(["mean", "sum", "min", "max"]),
)
def test_the_epoch_value_is_the_weighted_mean_of_all_values(pairs, reduce_fx):
    from hasten.trainer.logged import LoggedValues

    board = LoggedValues(training=True)
    for value, size in pairs:
        board.begin_batch(torch.zeros(size))
        board.log("training_step", "x", torch.tensor(value), on_step=False, on_epoch=True, reduce_fx=reduce_fx)
    board.stepping = False
    found = {}
    board.collect(found, {}, {})
    exact = {
        "mean": sum(value * size for value, size in pairs) / sum(size for _, size in pairs),
        "sum": sum(value for value, _ in pairs),
        "min": min(value for value, _ in pairs),
        "max": max(value for value, _ in pairs),
    }[reduce_fx]
    assert float(found["x"]) == pytest.approx(exact, rel=1e-4, abs=0.05 if reduce_fx in ("mean", "sum") else 0)


def test_loggers_get_steps_and_epochs_at_their_steps():
    logger = Remembering()
    trainer = quiet(max_epochs=2, logger=logger, log_every_n_steps=2)
    module = Logging(training_step=[("x", the_mean, {"on_epoch": True})], validation_step=[("v", the_mean, {})])
    trainer.fit(module, numbers(), numbers(3))
    found = [(step, sorted(metrics)) for step, metrics in logger.got]
    assert found == [
        (1, ["epoch", "x_step"]),
        (2, ["epoch", "v"]),
        (2, ["epoch", "x_epoch"]),
        (3, ["epoch", "x_step"]),
        (5, ["epoch", "x_step"]),
        (5, ["epoch", "v"]),
        (5, ["epoch", "x_epoch"]),
    ]


def test_the_logged_step_can_be_given():
    logger = Remembering()
    how = {"on_step": False, "on_epoch": True}
    trainer = quiet(logger=logger)
    trainer.fit(Logging(training_step=[("x", the_mean, how), ("step", 77.0, how)]), numbers())
    assert logger.got == [(77, {"x": pytest.approx(2.0)})]


# -- several loaders ---------------------------------------------------------------------------------------


def test_several_loaders_are_told_apart():
    module = Logging(
        validation_step=[
            ("x", the_mean, {}), ("y", the_mean, {"on_step": True, "on_epoch": True}),
            ("same", the_mean, {"add_dataloader_idx": False, "on_epoch": True}),
        ],
    )  # fmt: skip
    with pytest.raises(HastenError, match="same"):  # one name for two loaders: one would hide the other
        quiet().validate(module, [numbers(), numbers(3)], verbose=False)
    module = Logging(validation_step=[("x", the_mean, {}), ("y", the_mean, {"on_step": True, "on_epoch": True})])
    trainer = quiet()
    assert trainer.validate(module, [numbers(), numbers(3)], verbose=False) == [
        {"x/dataloader_idx_0": 2.0, "y_epoch/dataloader_idx_0": 2.0},
        {"x/dataloader_idx_1": 1.0, "y_epoch/dataloader_idx_1": 1.0},
    ]
    assert set(trainer.callback_metrics) == {
        f"{name}/dataloader_idx_{index}" for name in ("x", "y", "y_epoch") for index in (0, 1)
    }


def test_names_chosen_by_loader():
    class Chosen(Logging):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.log(f"set{dataloader_idx}", batch.mean(), add_dataloader_idx=False)

        def on_validation_epoch_end(self):
            self.log("both", 5.0)

    trainer = quiet()
    results = trainer.validate(Chosen(), [numbers(), numbers(3)], verbose=False)
    assert results == [{"set0": 2.0, "both": 5.0}, {"set1": 1.0, "both": 5.0}]


def test_a_name_with_the_loaders_number_is_refused():
    module = Logging(validation_step=[("x/dataloader_idx_0", 1.0, {})])
    with pytest.raises(HastenError, match="dataloader_idx_0"):
        quiet().validate(module, [numbers(), numbers()], verbose=False)


# -- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "how", "error"),
    [
        ({"a": 1.0}, {}, "dict"),
        (torch.zeros(2), {}, r"single element.*\(2,\)"),
        ("text", {}, "str"),
        (None, {}, "NoneType"),
        (1.0, {"on_step": False, "on_epoch": False}, "logs nothing"),
        (1.0, {"reduce_fx": "median"}, "median"),
        (1.0, {"reduce_fx": torch.median}, "median"),
    ],
)
def test_what_cannot_be_logged(value, how, error):
    with pytest.raises((HastenError, ValueError), match=error):
        fitted(("x", value, how))


def test_one_name_twice_in_a_hook():
    trainer = fitted(("x", 1.0, {}), ("x", 3.0, {}))
    assert float(trainer.callback_metrics["x"]) == 3.0
    with pytest.raises(HastenError, match=r"twice in `training_step` with different arguments"):
        fitted(("x", 1.0, {}), ("x", 3.0, {"prog_bar": True}))


def test_integers_are_reduced_as_floats_and_that_is_said():
    with pytest.warns(UserWarning, match="integer"):
        trainer = fitted(("x", torch.tensor(3), {"on_epoch": True}))
    assert trainer.callback_metrics["x_epoch"].dtype == torch.float32


def test_a_batch_without_a_size():
    class Odd(Logging):
        def training_step(self, batch, batch_idx):
            self.log("x", 1.0, on_epoch=True)
            return self.net.weight.sum()

    with pytest.raises(HastenError, match=r"batch_size="):
        quiet().fit(Odd(), DataLoader([1, 2], collate_fn=lambda rows: object()))


# -- values ------------------------------------------------------------------------------------------------


def test_log_dict_logs_each():
    class Several(Logging):
        def training_step(self, batch, batch_idx):
            self.log_dict({"a": 1.0, "b": batch.sum()}, prog_bar=True)
            return self.net.weight.sum()

    trainer = quiet()
    trainer.fit(Several(), numbers())
    assert trainer.progress_bar_metrics == {"a": 1.0, "b": 4.0}


def test_a_value_that_changes_in_place_afterwards_is_kept_as_it_was():
    class InPlace(Logging):
        def training_step(self, batch, batch_idx):
            value = torch.tensor(float(batch_idx))
            self.log("x", value, on_epoch=True, reduce_fx="sum")
            value += 100
            return self.net.weight.sum()

    trainer = quiet()
    trainer.fit(InPlace(), numbers())
    assert values(trainer.callback_metrics) == {"x": 3.0, "x_step": 2.0, "x_epoch": 3.0}


def test_graphs_are_dropped_unless_asked_for():
    seen = {}

    class Graphs(Logging):
        def training_step(self, batch, batch_idx):
            loss = self.net(batch[:, None]).mean()
            self.log("without", loss)
            self.log("with", loss, enable_graph=True)
            return loss

        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen.update({name: value.requires_grad for name, value in self.trainer.callback_metrics.items()})

    quiet().fit(Graphs(), numbers())
    assert seen == {"without": False, "with": True}


def test_metrics_are_forgotten_between_runs_and_kept_between_epochs():
    class First(Logging):
        def training_step(self, batch, batch_idx):
            if self.current_epoch == 0:
                self.log("only_first", 1.0, on_epoch=True, on_step=False)
            self.log("epoch", float(self.current_epoch), on_epoch=True, on_step=False)
            return self.net.weight.sum()

    trainer = quiet(max_epochs=2)
    trainer.fit(First(), numbers())
    assert values(trainer.callback_metrics) == {"only_first": 1.0, "epoch": 1.0}
    trainer.validate(Logging(validation_step=[("v", 2.0, {})]), numbers(), verbose=False)
    assert values(trainer.callback_metrics) == {"v": 2.0}


def test_the_sanity_check_leaves_no_values():
    seen = []

    class Looks(Callback):
        def on_train_start(self, trainer, module):
            seen.append(dict(trainer.callback_metrics))

    fitted(("x", 1.0, {}), hook="validation_step", validation=numbers(), callbacks=Looks())
    assert seen == [{}]
