"""Many short blocks of one running training, each under other techniques: which of them help, and by how much."""
