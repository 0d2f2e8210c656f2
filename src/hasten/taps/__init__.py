"""Taps: places where hasten listens to, and may change, what an unmodified script builds.

`hasten run` starts the very Python command a person would have typed, with `taps/site` first on PYTHONPATH. Its
`sitecustomize` starts the taps before the script's first line, in the process itself and in every Python child
it has (spawned workers, torchrun's ranks). Nothing is imported until the script imports torch.

What is tapped in a process that is listened to, by which file (doctor's observers tap more, see `doctor/observe`):

    data        DataLoader.__init__, __iter__; _BaseDataLoaderIter.__next__; _DatasetKind.create_fetcher where a
                technique acts there; DataLoader._index_sampler in a trial; the same of torchdata's StatefulDataLoader
    modules     Module.__call__; torch.autograd.backward, grad
    optimizers  Optimizer.__init__, zero_grad, and torch's own hooks around step
    results     the losses of torch.nn.functional, scaled_dot_product_attention; torch.jit.script; GradScaler.scale;
                torch.save; Tensor.to, Tensor.cuda where there is a GPU
    session     sys.excepthook; os._exit where doctor bounds the run (`bounds`)
    overlaid    `open` and the functions of os and shutil that write, in a trial (the sandbox)
    overlaid_libraries  what torch, SQLite and safetensors open by native code, in a trial
    seeds       random.seed, numpy.random.seed, torch.manual_seed in a trial

Functions of torch are replaced by `wrapping.tap`, which keeps what was there as their `__wrapped__`. A script's process
keeps its taps to its end.
"""
