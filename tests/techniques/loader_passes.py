"""Ways in which scripts pass over a loader."""

from __future__ import annotations

PASSES = {
    "inside itself": """
    for number, (x, _) in enumerate(loader):
        seen.append(x.tolist())
        if number == 1:
            seen += [inner.tolist() for inner, _ in loader]""",
    "zipped with itself": "seen += [[x.tolist(), y.tolist()] for (x, _), (y, _) in zip(loader, loader)]",
    "zipped": """
    other = DataLoader(Data(), 2, shuffle=True)
    seen += [[x.tolist(), y.tolist()] for (x, _), (y, _) in zip(loader, other)]""",
    "by hand": """
    one, other = iter(loader), iter(loader)
    torch.manual_seed(5)
    seen += [next(one)[0].tolist(), next(other)[0].tolist(), torch.rand(1).item(), next(one)[0].tolist()]""",
    "cut short": """
    for epoch in range(3):
        for number, (x, _) in enumerate(loader):
            seen.append(x.tolist())
            if number == epoch: break""",
    "with draws between": "seen += [[x.tolist(), torch.rand(1).item()] for x, _ in loader]",
    "a generator of its own": """
    loader = DataLoader(Data(), 3, shuffle=True, generator=torch.Generator().manual_seed(1))
    for epoch in range(2): seen += [[x.tolist(), int(loader.generator.initial_seed())] for x, _ in loader]
    seen.append(loader.generator.get_state().tolist())""",
    "a batch size that grows": """
    for x, _ in loader:
        seen.append(x.tolist())
        loader.batch_sampler.batch_size = 2""",
    "by the length": "seen += [len(loader), len(iter(loader)), loader.num_workers]",
    "with a sampler that listens": """
    class Listens:
        last = 0
        def __len__(self): return 10
        def __iter__(self):
            for _ in range(10): yield self.last
    sampler = Listens()
    for number, (x, _) in enumerate(DataLoader(Data(), 1, sampler=sampler)):
        seen.append(x.tolist()); sampler.last = (number * 7) % 10""",
    "with replacement": """
    from torch.utils.data import RandomSampler
    g = torch.Generator()
    for x, _ in DataLoader(Data(), 4, sampler=RandomSampler(Data(), True, 100, g)):
        seen.append([x.tolist(), torch.randint(9, (), generator=g).item()])""",
    "with weights": """
    from torch.utils.data import WeightedRandomSampler
    sampler = WeightedRandomSampler(torch.ones(10), 20)
    for x, _ in DataLoader(Data(), 4, sampler=sampler):
        seen.append(x.tolist()); sampler.weights[int(x[0])] = 0""",
    "with indices that change": """
    from torch.utils.data import SubsetRandomSampler
    sampler = SubsetRandomSampler([1, 2, 3, 4, 5])
    for epoch in range(2):
        for x, _ in DataLoader(Data(), 1, sampler=sampler):
            seen.append(x.tolist())
            sampler.indices = [int(x) + 1 for x in sampler.indices] if epoch else sampler.indices""",
    "that begins no second one": """
    class Again:
        def __init__(self, sampler): self.sampler = sampler
        def __iter__(self):
            while True: yield from iter(self.sampler)
    class Endless(DataLoader):
        def __init__(self, *given):
            super().__init__(*given)
            object.__setattr__(self, "batch_sampler", Again(self.batch_sampler))
            self.iterator = super().__iter__()
        def __iter__(self):
            for _ in range(len(self.batch_sampler.sampler)): yield next(self.iterator)
    endless = Endless(Data(), 3, True)
    for epoch in range(3):
        for x, _ in endless: seen.append([x.tolist(), torch.rand(1).item()])
    for step, (x, _) in enumerate(loader):
        seen.append(x.tolist())
        loader.__dict__["batch_sampler"] = Again(None)""",
    "whose batches are the dataset's own": """
    class Views(Data):
        def __init__(self): self.rows = torch.zeros(10, 2)
        def __getitem__(self, index): return self.rows[index]
    data = Views()
    for epoch in range(2):
        for row in DataLoader(data, batch_size=None):
            seen.append(row.tolist())
            row += 1
        for rows in DataLoader(data, 5, collate_fn=list):
            for row in rows: row += 1
    seen.append(data.rows.tolist())""",
}
