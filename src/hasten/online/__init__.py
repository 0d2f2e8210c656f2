"""Online tuning: switch techniques between short blocks of one running training, and estimate each one's effect."""
