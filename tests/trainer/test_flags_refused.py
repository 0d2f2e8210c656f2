"""Flags that are unknown, of an earlier day, of the wrong kind, or contradict each other; flags of no use here."""

import difflib
import inspect

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

import hasten
from hasten import HastenError, Plan
from hasten.callbacks import GradientAccumulationScheduler, ModelCheckpoint, Progress
from tests.trainer.trainings import QUIET, Regression, dataset, loader, quiet

FLAGS = [name for name in inspect.signature(hasten.Trainer).parameters if name != "unknown"]
NO_GPU = not torch.cuda.is_available()


def refused(*errors, **flags):
    """What a Trainer says to flags that it does not take."""
    with pytest.raises((HastenError, *errors)) as caught:
        hasten.Trainer(**{**QUIET, **flags})
    return str(caught.value)


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if len(flag) > 4])
def test_a_mistyped_flag_is_recognized(flag):
    for mistyped in (flag[:-2] + flag[-1], flag.replace("_", "") if "_" in flag else flag + "s", flag + "_"):
        close = difflib.get_close_matches(mistyped, FLAGS, n=1)
        said = refused(**{mistyped: 1})
        assert mistyped in said
        assert f"did you mean {close[0]}?" in said


def test_an_unknown_flag_is_a_type_error_that_lists_the_flags():
    with pytest.raises(TypeError, match="unexpected keyword argument 'zzzz'") as caught:
        quiet(zzzz=1)
    assert "accumulate_grad_batches" in str(caught.value)
    with pytest.raises(TypeError):
        hasten.Trainer("cpu")  # flags have names


@pytest.mark.parametrize(
    ("old", "today"),
    [
        ("gpus", 'devices=N, accelerator="gpu"'),
        ("nb_gpu_nodes", "num_nodes=N"),
        ("num_gpu_nodes", "num_nodes=N"),
        ("distributed_backend", 'strategy="ddp"'),
        ("amp_level", "bf16-mixed"),
        ("amp_backend", "bf16-mixed"),
        ("use_amp", "bf16-mixed"),
        ("fp16", "16-mixed"),
        ("max_nb_epochs", "max_epochs=N"),
        ("train_percent_check", "limit_train_batches="),
        ("val_percent_check", "limit_val_batches="),
        ("overfit_pct", "overfit_batches="),
        ("nb_sanity_val_steps", "num_sanity_val_steps="),
        ("gradient_clip", "gradient_clip_val="),
        ("max_grad_norm", "gradient_clip_val="),
        ("gradient_accumulation_steps", "accumulate_grad_batches="),
        ("checkpoint_callback", "enable_checkpointing="),
        ("early_stop_callback", "EarlyStopping"),
        ("resume_from_checkpoint", "ckpt_path="),
        ("progress_bar_refresh_rate", "Progress(refresh_rate=N)"),
        ("weights_summary", "enable_model_summary="),
        ("default_save_path", "default_root_dir="),
        ("row_log_interval", "log_every_n_steps="),
        ("replace_sampler_ddp", "use_distributed_sampler="),
        ("tpu_cores", "CPUs and NVIDIA GPUs"),
        ("torch_compile", "compile=True"),
        ("gradient_checkpointing", "activation_checkpointing=True"),
        ("mixed_precision", "precision="),
        ("lr", "configure_optimizers"),
        ("num_workers", "DataLoader"),
        ("patience", "EarlyStopping"),
    ],
)
def test_flags_of_old_days_get_todays(old, today):
    said = refused(**{old: 2})
    assert f"{old}=" in said
    assert today in said


def test_what_old_flags_are_answered_with_exists():
    from hasten.trainer.flags import OLD_FLAGS

    for old, today in OLD_FLAGS.items():
        assert old not in FLAGS
        for word in today.replace(",", " ").replace('"', " ").split():
            name, equals, _ = word.partition("=")
            if equals and name.isidentifier():
                assert name in [*FLAGS, "ckpt_path"], (old, today)


@pytest.mark.parametrize(
    ("flag", "values"),
    {
        "max_epochs": (-2, 1.5, "3", True),
        "min_epochs": (-1, 1.5),
        "max_steps": (-2, None, 1.5, "9"),
        "min_steps": (-1, 0.5),
        "num_nodes": (0, -1, 1.0, "two"),
        "log_every_n_steps": (-1, 0.5),
        "num_sanity_val_steps": (-2, 0.5),
        "reload_dataloaders_every_n_epochs": (-1, 0.5, None),
        "check_val_every_n_epoch": (0, -1, 0.5),
        "optimizer_in_backward": ("yes",),
        "microbatch": (0, -1, 2.5, True, "half"),
        "accumulate_grad_batches": (0, -1, 1.5, None, {0: 0}, {-1: 2}, {0: 1.5}, {"0": 2}),
        "gradient_clip_val": (-1, -0.1),
        "gradient_clip_algorithm": ("nom", "l2", 2),
        "limit_train_batches": (-1, 1.5, -0.1, "all", True),
        "limit_val_batches": (-1, 1.5, "all"),
        "limit_test_batches": (-1, 1.5, "all"),
        "limit_predict_batches": (-1, 1.5, "all"),
        "overfit_batches": (-1, 1.5, "all"),
        "val_check_interval": (-1, 1.5, "soon", "00:99:00:00", "1:2:3"),
        "max_time": ("soon", "00:24:00:00", "12:00", 12),
        "precision": ("17", "fp8", "bf16_mixed", 128),
        "accelerator": ("tpu", "mps", "gpus", None),
        "devices": (0, "0", [], -3, "two", 1.5),
        "strategy": ("dpp", "deepspeed", 3),
        "profiler": ("advanced", "simpel"),
        "checkpoint_format": ("pickle",),
        "seed": (-1, 2**32, "x", 1.5),
        "fast_dev_run": (-1, 1.5, "yes"),
        "deterministic": ("wran", 3),
        "compile": ("fastest", 1, {"activation_budget": 2}),
        "matmul_precision": ("low", True),
        "activation_checkpointing": ("Not a class", 0),
        "activation_offload": ("yes",),
        "fp8": (True, "e4m3"),
        "host_embeddings": ("yes", 0, 2.5),
        "chunked_loss": ("yes",),
        "channels_last": ("yes", 1),
        "fused_optimizer": ("yes",),
        "batched_fetch": ("yes",),
        "device_prefetch": ("yes", 3),
        "barebones": ("yes",),
        "inference_mode": ("yes",),
        "benchmark": ("yes",),
        "detect_anomaly": ("yes",),
        "sync_batchnorm": ("yes",),
        "use_distributed_sampler": ("yes",),
        "enable_checkpointing": ("yes",),
        "enable_progress_bar": ("yes",),
        "enable_model_summary": ("yes",),
        "enable_autolog_hparams": ("yes",),
        "background_saves": ("yes",),
        "callbacks": (3, ["no"], "EarlyStopping"),
        "logger": (3, "csv"),
        "plan": ("there-is-no.toml", 3),
        "default_root_dir": (3,),
    }.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_out_of_range_are_named(flag, values):
    for value in values:
        said = refused(TypeError, ValueError, OSError, **{flag: value})
        assert flag.rpartition("_")[2] in said.lower(), (value, said)


def test_every_flag_is_checked():
    table = next(mark for mark in test_values_out_of_range_are_named.pytestmark if mark.name == "parametrize").args[1]
    assert [flag for flag in FLAGS if flag not in dict(table)] == []


@pytest.mark.parametrize(
    ("given", "full"),
    [(None, "32-true"), (32, "32-true"), ("32", "32-true"), (16, "16-mixed"), ("16", "16-mixed"),
     ("bf16", "bf16-mixed"), (64, "64-true"), ("64", "64-true"), ("16-true", "16-true"), ("bf16-true", "bf16-true")],
)  # fmt: skip
def test_short_names_of_precisions(given, full):
    assert quiet(precision=given).precision == full


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"barebones": True, "logger": True}, "logger"),
        ({"barebones": True, "enable_checkpointing": True}, "enable_checkpointing"),
        ({"barebones": True, "enable_progress_bar": True}, "enable_progress_bar"),
        ({"barebones": True, "enable_model_summary": True}, "enable_model_summary"),
        ({"barebones": True, "log_every_n_steps": 5}, "log_every_n_steps"),
        ({"barebones": True, "num_sanity_val_steps": 1}, "num_sanity_val_steps"),
        ({"barebones": True, "fast_dev_run": True}, "fast_dev_run"),
        ({"barebones": 1, "fast_dev_run": 1}, "fast_dev_run=1"),
        ({"barebones": True, "detect_anomaly": True}, "detect_anomaly"),
        ({"barebones": True, "profiler": "simple"}, "profiler"),
        ({"enable_checkpointing": False, "callbacks": ModelCheckpoint()}, "ModelCheckpoint"),
        ({"enable_progress_bar": False, "callbacks": Progress()}, "Progress"),
        ({"enable_progress_bar": None, "callbacks": [Progress(), Progress()]}, "Progress"),
        ({"check_val_every_n_epoch": None, "val_check_interval": 0.5}, "val_check_interval"),
        (
            {"accumulate_grad_batches": {2: 4}, "callbacks": GradientAccumulationScheduler({1: 2})},
            "GradientAccumulationScheduler",
        ),
        ({"precision": "bf16-mixed", "plan": Plan({"precision": "16-mixed"})}, "precision"),
        ({"compile": True, "plan": Plan({"compile": "reduce-overhead"})}, "compile"),
        ({"batched_fetch": True, "plan": Plan({"batched_fetch": False})}, "batched_fetch"),
    ],
)
def test_contradictions(flags, named):
    assert named in refused(**flags)


def test_contradictions_that_show_in_fit():
    with pytest.raises(HastenError, match="min_epochs"):
        quiet(min_epochs=3, max_epochs=2).fit(Regression(), loader())
    with pytest.raises(HastenError, match="min_steps"):
        quiet(min_steps=30, max_steps=20).fit(Regression(), loader())
    with pytest.raises((HastenError, ValueError), match="val_check_interval=9"):
        quiet(val_check_interval=9).fit(Regression(), loader(), loader())


def test_several_machines_need_a_launcher():
    with pytest.raises(HastenError, match=r"(?s)num_nodes=2.*(torchrun|srun)"):
        quiet(num_nodes=2).fit(Regression(), loader())


@pytest.mark.skipif(not NO_GPU, reason="this machine has a GPU")
@pytest.mark.parametrize("accelerator", ["gpu", "cuda"])
def test_a_gpu_that_is_not_there(accelerator):
    said = refused(accelerator=accelerator)
    assert "GPU" in said


# -- flags that are fine and of no use ---------------------------------------------------------------------


def said_in_fit(capsys, module=None, **flags):
    quiet(**flags).fit(module or Regression(), loader())
    return capsys.readouterr().err


@pytest.mark.skipif(not NO_GPU, reason="this machine has a GPU")
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"device_prefetch": True}, "device_prefetch"),
        ({"matmul_precision": "high"}, "matmul_precision"),
        ({"benchmark": True}, "cudnn_benchmark"),
        ({"precision": "16-mixed"}, "precision"),
        ({"precision": "64-true"}, "precision"),
    ],
)
def test_flags_that_can_do_nothing_on_this_machine_say_so(flags, named, capsys):
    err = said_in_fit(capsys, **flags)
    assert f"{named}=" in err
    assert "of no use here" in err
    assert err.count(f"{named}=") == 1


def test_flags_that_find_nothing_to_act_on_say_so(capsys):
    assert "channels_last found no model with 2-D convolutions" in said_in_fit(capsys, channels_last=True)
    single = Regression(net=torch.nn.Linear(4, 1))
    said = said_in_fit(capsys, single, activation_checkpointing=True)
    assert "activation_checkpointing found no repeated blocks" in said
    module = Regression(lambda parameters: torch.optim.Rprop(parameters))
    assert "fused_optimizer" in said_in_fit(capsys, module, fused_optimizer=True)
    trainer = quiet(batched_fetch=True)
    trainer.fit(Regression(), DataLoader(dataset(), batch_size=8, collate_fn=lambda rows: default_collate(rows)))
    assert "batched_fetch found no DataLoader over a TensorDataset" in capsys.readouterr().err


def test_flags_of_convenience_that_do_not_apply_say_so(capsys):
    for flags in ({"sync_batchnorm": True}, {"gradient_clip_algorithm": "value"}):
        err = said_in_fit(capsys, **flags)
        assert f"{next(iter(flags))}=" in err
        assert "of no use" in err


def test_nothing_is_said_of_flags_that_work(capsys):
    err = said_in_fit(capsys, batched_fetch=True, precision="bf16-mixed" if torch.cuda.is_available() else None)
    assert err == "hasten: fit stopped: max_epochs=1 reached\n"


# -- plan --------------------------------------------------------------------------------------------------


def test_a_plan_from_a_file_and_a_plan_object_install_the_same(tmp_path):
    path = tmp_path / "hasten.toml"
    path.write_text('[techniques]\nbatched_fetch = true\nprecision = "bf16-mixed"\n')
    for plan in (path, str(path), Plan.read(path), Plan({"batched_fetch": True, "precision": "bf16-mixed"})):
        trainer = quiet(plan=plan)
        assert [technique.name for technique in trainer.run.techniques] == ["batched_fetch", "precision"]
        assert trainer.precision == "bf16-mixed"


def test_a_flag_may_repeat_the_plan_and_add_to_it():
    trainer = quiet(plan=Plan({"batched_fetch": True}), batched_fetch=True, fused_optimizer=True)
    assert [technique.name for technique in trainer.run.techniques] == ["batched_fetch", "fused_optimizer"]


def test_a_plan_with_a_mistake_names_the_line(tmp_path):
    path = tmp_path / "hasten.toml"
    path.write_text("[techniques]\nbatched_fetch = true\nchanels_last = true\n")
    with pytest.raises(HastenError, match=r"(?s)hasten.toml:3.*channels_last"):
        quiet(plan=path)
    path.write_text('[techniques]\nbatched_fetch = true\nprecision = "bf16-mixed"\n')
    with pytest.raises(HastenError, match=r"(?s)hasten.toml:3.*precision|precision.*hasten.toml:3"):
        quiet(plan=path, precision="16-mixed")


def test_glibc_is_told_in_the_process_that_runs(capsys):
    trainer = quiet(plan=Plan({"allocator": "glibc"}))
    trainer.fit(Regression(), loader())
    assert [technique.name for technique in trainer.run.techniques] == ["allocator"]
    assert "not installed" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["no_grad_validation", "set_to_none", "debug_off", "allocator"])
def test_techniques_that_the_trainer_has_anyway_are_named(name, capsys):
    trainer = quiet(plan=Plan({name: "jemalloc" if name == "allocator" else True}))
    trainer.fit(Regression(), loader())
    assert f"{name} of the plan is not installed" in capsys.readouterr().err
    assert trainer.run.techniques == []


def test_a_technique_that_is_off_in_the_plan_is_off():
    trainer = quiet(plan=Plan({"batched_fetch": False}))
    assert trainer.run.techniques == []
