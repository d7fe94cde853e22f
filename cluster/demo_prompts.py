"""The prompts of `dspark demo`: a few of each kind, since acceptance depends on what is written."""

PROMPTS: tuple[tuple[str, str], ...] = (
    ("code", "Write a Python function that returns the n-th Fibonacci number iteratively."),
    ("code", "Write a Python class for a stack with push, pop and peek methods."),
    ("math", "Tom has 12 apples. He gives 3 to each of his 2 friends. How many are left? Explain."),
    ("math", "What is 15% of 240? Show the steps."),
    ("chat", "Give me five tips for sleeping better."),
    ("chat", "What is the difference between weather and climate?"),
    ("prose", "Write the opening of a story about a lighthouse keeper who finds a message."),
    ("prose", "Describe a quiet morning in a small harbour town."),
)
