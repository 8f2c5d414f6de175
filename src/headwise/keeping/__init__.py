"""What keeps a run folder whole: its lock, its record of finished stages, and writing that a kill cannot harm."""
