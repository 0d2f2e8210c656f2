"""EMA: the average against one computed by hand; validation, checkpoints and resume with it."""

import pytest
import torch

import hasten
from hasten import HastenError
from hasten.trainer.callbacks import EMA, Callback, ModelCheckpoint
from tests.trainer.callbacks.trainings import Regression, loader, same, trained, weights


class Path(Callback):
    """Keeps the weights before and after each step."""

    def __init__(self):
        self.seen = []

    def on_train_start(self, trainer, module):
        self.seen.append(weights(module))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen.append(weights(module))


def average(ema):
    model = Regression()
    ema.apply_to(model)
    return weights(model)


def close(one, other):
    return all(torch.allclose(one[name], other[name], atol=1e-6) for name in one)


@pytest.mark.parametrize(("every", "warmup"), [(1, False), (1, True), (2, False)])
def test_the_average(tmp_path, every, warmup):
    path, ema = Path(), EMA(0.9, every_n_steps=every, warmup=warmup)
    trained(tmp_path, [path, ema], epochs=2)
    by_hand = path.seen[0]
    for update, now in enumerate(path.seen[every::every]):
        decay = min(0.9, (1 + update) / (10 + update)) if warmup else 0.9
        by_hand = {name: decay * by_hand[name] + (1 - decay) * now[name] for name in now}
    assert close(average(ema), by_hand)
    assert ema.updates == len(path.seen[every::every])


def test_it_begins_later(tmp_path):
    path, ema = Path(), EMA(0.5, start_step=3)
    trained(tmp_path, [path, ema])
    assert close(average(ema), {name: (path.seen[3][name] + path.seen[4][name]) / 2 for name in path.seen[3]})


class Validated(Callback):
    def __init__(self):
        self.weights = {}

    def on_validation_epoch_end(self, trainer, module):
        self.weights["validation"] = weights(module)

    def on_test_epoch_end(self, trainer, module):
        self.weights["test"] = weights(module)


def test_validation_and_test_use_the_average_and_training_does_not(tmp_path):
    path, ema, validated = Path(), EMA(0.9), Validated()
    plain = Path()
    trained(tmp_path, [plain], epochs=2)
    model = Regression()
    trainer = trained(tmp_path, [path, ema, validated], model, epochs=2)
    assert same(path.seen[-1], plain.seen[-1])
    assert same(weights(model), plain.seen[-1])
    assert same(validated.weights["validation"], average(ema))
    model.test_step = lambda batch, batch_idx: None
    trainer.test(model, loader(), verbose=False)
    assert same(validated.weights["test"], average(ema))
    assert same(weights(model), plain.seen[-1])


def test_validation_with_the_weights_themselves(tmp_path):
    path, validated = Path(), Validated()
    trained(tmp_path, [path, EMA(0.9, validate_with_average=False), validated])
    assert same(validated.weights["validation"], path.seen[-1])


def test_left_in_the_model_at_the_end(tmp_path):
    ema, model = EMA(0.9, apply_at_end=True), Regression()
    trained(tmp_path, [ema], model)
    assert same(weights(model), average(ema))


def test_a_checkpoint_holds_the_average_and_a_resumed_run_is_exact(tmp_path):
    def callbacks():
        return EMA(0.9), ModelCheckpoint(tmp_path / "kept", "{epoch}", save_top_k=-1)

    whole, kept = callbacks()
    model = Regression(optimizer=torch.optim.Adam)
    trained(tmp_path, [whole, kept], model, epochs=4)
    half = tmp_path / "kept" / "epoch=1.ckpt"
    ema, kept = callbacks()
    resumed = Regression(optimizer=torch.optim.Adam)
    trained(tmp_path, [ema, kept], resumed, epochs=4, ckpt_path=half)
    assert same(weights(resumed), weights(model))
    assert same(average(ema), average(whole))
    assert ema.updates == whole.updates


def test_testing_the_best_tests_what_validation_saw(tmp_path):
    ema, validated = EMA(0.9), Validated()
    kept = ModelCheckpoint(tmp_path / "kept", "{epoch}", monitor="score")
    model = Regression(scores=(0.0, 1.0))
    model.test_step = lambda batch, batch_idx: None

    class First(Callback):
        def on_validation_epoch_end(self, trainer, module):
            if trainer.current_epoch == 0:
                self.weights = weights(module)

    first = First()
    trainer = trained(tmp_path, [ema, validated, first, kept], model, epochs=2)
    trainer.test(model, loader(), ckpt_path="best", verbose=False)
    assert same(validated.weights["test"], first.weights)


@pytest.mark.parametrize(("precision", "wide"), [("bf16-true", torch.float32), ("64-true", torch.float64)])
def test_a_converted_model_is_averaged_in_a_type_that_holds_small_changes(tmp_path, precision, wide):
    path, ema = Path(), EMA(0.99)
    trained(tmp_path, [path, ema], Regression(), epochs=2, precision=precision, validate=False)
    first, *later = [{name: weight.to(wide) for name, weight in seen.items()} for seen in path.seen]
    for now in later:
        first = {name: torch.lerp(first[name], now[name], 1 - 0.99) for name in now}
    assert {one.dtype for one in ema._average.values()} == {wide}
    assert close(ema._average, first)


def test_arguments_and_modules_that_do_not_fit():
    with pytest.raises(HastenError, match="decay"):
        EMA(1.0)
    with pytest.raises(HastenError, match="every_n_steps"):
        EMA(every_n_steps=0)
    with pytest.raises(HastenError, match="no average yet"):
        EMA().apply_to(hasten.Module())
