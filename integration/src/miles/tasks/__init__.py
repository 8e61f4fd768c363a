"""Tasks that ship with Miles: prompts, an agent that speaks OpenAI chat, and a grader."""
