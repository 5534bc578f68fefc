"""A recorded load under other settings: how long steps take, and the scheduler run on them."""
