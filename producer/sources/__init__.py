"""Everything people keep prompts in -> rows, in one order. The door is `inputs.read_pieces`."""
