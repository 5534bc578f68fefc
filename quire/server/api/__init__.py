"""What clients say and read: one protocol after the other, its fields and how its answers are written."""
