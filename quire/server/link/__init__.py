"""Between processes: messages, the engine's process, several of them, several HTTP sides."""
