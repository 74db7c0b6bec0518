"""Everything people keep prompts in -> items, one at a time. The door is `inputs.read_items`."""
