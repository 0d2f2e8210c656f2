"""The trainings of test_switching.py: one script, run plain, or with techniques that are switched as it runs."""

SCRIPT = '''
    import random, sys
    import numpy, torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset, TensorDataset

    KIND, SETTINGS, SCHEDULE = {kind!r}, {settings!r}, {schedule!r}
    GO_ON, BEFORE, BETWEEN, WORKERS = {go_on!r}, {before!r}, {between!r}, {workers!r}
    torch.set_num_threads(1)
    board, told = None, set()
    if SETTINGS:
        from hasten.switchboard import Switchboard
        from hasten.taps import data, modules, optimizers
        from hasten.taps.config import RunConfig
        from hasten.taps.session import ProcessSession
        from hasten.techniques import CATALOGUE

        session = ProcessSession(RunConfig())
        board = session.run = Switchboard([CATALOGUE[name](setting) for name, setting in SETTINGS])
        board.process()
        for tap in (data, modules, optimizers):
            tap.install(session)

    class Drawing(Dataset):
        """Words, of which some are replaced by lot."""
        def __init__(self, words):
            self.words = words
        def __len__(self):
            return len(self.words)
        def __getitem__(self, index):
            line = self.words[index].clone()
            line[random.randrange(8)] = int(torch.randint(50, ()))
            line[numpy.random.randint(8)] = 1
            return line, self.words[index, 0] % 2

    def shifted(index):
        return (torch.arange(8) * (index + 1)) % 50

    class Made(Dataset):
        """Lines that are made of their number; some draw random numbers besides."""
        def __init__(self, draws):
            self.loader, self.draws = shifted, draws
        def __len__(self):
            return 48
        def __getitem__(self, index):
            line = self.loader(index)
            return (line.roll(random.randrange(8)) if self.draws else line), index % 2

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.read = nn.Embedding(50, 24), nn.LSTM(24, 24, 2, dropout=0.2, batch_first=True)
            self.out = nn.Linear(24, 2)
        def forward(self, lines):
            return self.out(self.read(self.words(lines))[0][:, -1])

    torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
    generator = torch.Generator().manual_seed(1)
    if KIND in ("images", "large"):
        wide = 1024 if KIND == "large" else 32
        model = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.2),
            nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, wide), nn.Tanh(),
            nn.Dropout(0.2), nn.Linear(wide, 2),
        )
        x = torch.randn(48, 3, 16, 16, generator=generator)
        dataset = TensorDataset(x, (x.mean((1, 2, 3)) > 0).long())
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    elif KIND == "blocks":
        block = lambda: nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2))
        model = nn.Sequential(nn.Linear(8, 16), nn.Sequential(*[block() for _ in range(3)]), nn.Linear(16, 2))
        x = torch.randn(48, 8, generator=generator)
        dataset = TensorDataset(x, (x.mean(1) > 0).long())
        optimizer = torch.optim.AdamW(model.parameters(), 0.003)
    elif KIND == "small":
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 2))
        x = torch.randn(48, 8, generator=generator)
        dataset = TensorDataset(x, (x.mean(1) > 0).long())
        optimizer = torch.optim.AdamW(model.parameters(), 0.003)
    else:
        lines = torch.randint(50, (48, 8), generator=generator)
        model, dataset = Words(), Drawing(lines) if KIND == "words" else Made(KIND == "drawn")
        optimizer = torch.optim.AdamW(model.parameters(), 0.003)
    loader = DataLoader(dataset, 16, shuffle=True, num_workers=WORKERS)
    held_out = DataLoader(TensorDataset(*dataset[:16]) if isinstance(dataset, TensorDataset) else dataset, 16)
    steps, losses, validated = 0, [], []

    def batch_step(x, y):
        global steps
        optimizer.zero_grad(set_to_none=False)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        steps += 1
        if steps in SCHEDULE and board is not None:
            board.switch(SCHEDULE[steps])
        exec(BETWEEN)

    def passes(count):
        global iterator
        for _ in range(count):
            model.train()
            iterator = iter(loader)
            for batch in iterator:
                batch_step(*batch)
            model.eval()
            for x, y in held_out:
                validated.append(nn.functional.cross_entropy(model(x), y).item())

    def state():
        layout = [
            (tuple(part.stride()), tuple(part.grad.stride()), [
                (name, kept.dtype, kept.stride()) if isinstance(kept, torch.Tensor) else (name, kept)
                for name, kept in sorted(optimizer.state[part].items())
            ])
            for part in model.parameters()
        ]
        gradients = [part.grad.clone() for part in model.parameters()]
        return dict(
            model={{name: part.clone() for name, part in model.state_dict().items()}}, gradients=gradients,
            optimizer=__import__("copy").deepcopy(optimizer.state_dict()), layout=layout,
            random=(torch.get_rng_state(), random.getstate(), repr(numpy.random.get_state())),
            numpy=numpy.random.get_state(),
        )

    exec(BEFORE)
    passes({passes})
    left = dict(trained=state(), losses=list(losses), validated=list(validated), told=told)
    if board is not None:
        board.switch({{}})
        left.update(acted=board.installed(), broken=board.broken, skipped=board.skipped)
    start = state()
    left["start"] = start
    if GO_ON:
        start = torch.load(GO_ON, weights_only=False)["start"]
        model.load_state_dict(start["model"]), optimizer.load_state_dict(start["optimizer"])
        for part, gradient in zip(model.parameters(), start["gradients"]):
            part.grad = gradient
        torch.set_rng_state(start["random"][0]), random.setstate(start["random"][1])
        numpy.random.set_state(start["numpy"])
    losses, validated = [], []
    passes(1)
    left["after"] = dict(state(), losses=losses, validated=validated)
    torch.save(left, "left.pt")
'''


def script(
    kind: str,
    settings: list[tuple[str, object]] | None = None,
    schedule: dict[int, dict[str, object]] | None = None,
    go_on: str = "",
    before: str = "",
    between: str = "",
    passes: int = 6,
    workers: int = 0,
) -> str:
    """Return a script that leaves its state, and that behind one more pass with all switched off."""
    return SCRIPT.format(
        kind=kind,
        settings=settings or [],
        schedule=schedule or {},
        go_on=go_on,
        before=before,
        between=between,
        passes=passes,
        workers=workers,
    )
