"""Online tuning: techniques switched between short blocks of one running training, and what each brings."""
