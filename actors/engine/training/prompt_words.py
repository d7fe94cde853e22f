"""Word lists for the chat and code prompts written for this project (no external text)."""

from __future__ import annotations

TOPICS = tuple(
    """photosynthesis; gravity; the water cycle; black holes; vaccines; inflation; compound interest;
    supply and demand; the French Revolution; the Roman Empire; the Silk Road; volcanoes; earthquakes;
    tides; rainbows; the Moon's phases; eclipses; DNA; evolution; the immune system; the human heart;
    sleep; dreams; memory; habits; stress; meditation; yoga; running; swimming; cycling; chess; football;
    the Olympic Games; jazz; classical music; guitars; the piano; painting; photography; poetry; novels;
    public speaking; job interviews; time management; budgeting; saving money; credit scores; taxes;
    renewable energy; solar panels; wind turbines; nuclear power; electric cars; batteries; recycling;
    composting; climate change; deforestation; coral reefs; whales; elephants; bees; butterflies; spiders;
    dogs; cats; horses; gardening; tomatoes; houseplants; bread baking; coffee; tea; chocolate; cheese;
    pasta; vegetarian food; breakfast; healthy snacks; the internet; Wi-Fi; passwords; encryption;
    databases; operating systems; machine learning; neural networks; chatbots; robots; drones; satellites;
    the space station; Mars; telescopes; comets; atoms; electricity; magnets; lasers; sound waves;
    airplanes; bridges; skyscrapers; trains; ships; maps; languages; Spanish; Japanese; sign language;
    democracy; constitutions; human rights; museums; libraries; universities; kindergartens; friendship;
    kindness; leadership; teamwork; negotiation; creativity; curiosity; failure; happiness; grief; humor;
    camping; hiking; fishing; travel; backpacking; Paris; Tokyo; Egypt; Brazil; Iceland; the Sahara;
    the Amazon rainforest; the Arctic; the Pacific Ocean; rivers; deserts; mountains; weather forecasts;
    hurricanes; tornadoes; snow; clouds; the seasons; calendars; clocks; money; banks; the stock market;
    insurance; mortgages; small businesses; marketing; customer service; remote work; email etiquette;
    writing a resume; learning to code; Python; spreadsheets; statistics; probability; geometry; algebra;
    prime numbers; fractions; logic puzzles; riddles; magic tricks; board games; video games; movies;
    animation; theater; dance; fashion; knitting; woodworking; home repair; cleaning; moving house;
    first aid; headaches; the common cold; allergies; vitamins; protein; hydration; dental care; eyesight;
    posture; aging; parenting; school; homework; exams; bullying; holidays; birthdays; weddings""".replace(
        "\n", " "
    ).split(";")
)

CHAT_TEMPLATES = (
    "Explain {a} in simple terms.",
    "What is the most important thing to know about {a}?",
    "Give me five tips about {a}.",
    "Write a short paragraph about {a}.",
    "Why is {a} interesting?",
    "How would you explain {a} to a ten-year-old?",
    "What are the advantages and disadvantages of {a}?",
    "Write a short story that involves {a}.",
    "Write a four-line poem about {a}.",
    "List three surprising facts about {a}.",
    "I want to learn about {a}. Where should I start?",
    "Tell me about {a}.",
    "What are some common misconceptions about {a}?",
    "Summarize the history of {a} in a few sentences.",
    "Can you give me advice about {a}?",
    "Write a friendly email to a colleague about {a}.",
    "Write a short dialogue between two friends talking about {a}.",
    "What questions should I ask an expert about {a}?",
    "Compare {a} and {b}.",
    "How are {a} and {b} related?",
    "Write a title and an introduction for an article about {a}.",
    "Make a simple plan for someone who wants to spend a week on {a}.",
    "What is the difference between {a} and {b}?",
    "Describe {a} as if I had never heard of it.",
    "Create a short quiz with three questions about {a}.",
    "What would the world be like without {a}?",
    "Rewrite this sentence more politely: I do not care about {a}.",
    "Suggest a good name for a club devoted to {a} and say why.",
)

CODE_TASKS = tuple(
    """reverses a string; counts the vowels in a string; checks whether a string is a palindrome;
    returns the factorial of n; returns the first n Fibonacci numbers; finds the largest number in a list;
    finds the second largest number in a list; removes duplicates from a list; merges two sorted lists;
    sorts a list with bubble sort; sorts a list with quicksort; sorts a list with merge sort;
    searches a sorted list with binary search; counts the words in a text; counts how often each letter occurs;
    converts Celsius to Fahrenheit; converts a number to binary; converts a Roman numeral to an integer;
    computes the greatest common divisor of two numbers; computes the least common multiple of two numbers;
    returns all prime numbers below n; sums the digits of a number; checks whether a year is a leap year;
    flattens a nested list; rotates a list by k places; transposes a matrix; multiplies two matrices;
    finds the longest word in a sentence; capitalizes every word; checks whether two strings are anagrams;
    computes the mean of a list; computes the median of a list; computes the standard deviation of a list;
    groups words by their first letter; inverts a dictionary; merges two dictionaries; reads a CSV file;
    writes a list of dictionaries to a JSON file; counts the lines of a file; lists the files of a folder;
    downloads a web page; parses a date string; computes the number of days between two dates;
    validates an email address; validates a password; generates a random password; shuffles a list;
    splits a list into chunks of size n; zips two lists into a dictionary; finds the intersection of two lists;
    finds the missing number in a range; finds all pairs that sum to a target; computes a moving average;
    checks balanced parentheses; evaluates a postfix expression; implements a stack; implements a queue;
    implements a linked list; implements a binary tree; traverses a graph breadth first;
    traverses a graph depth first; finds the shortest path in a grid; computes the edit distance of two strings;
    finds the longest common prefix; compresses a string with run-length encoding; applies a Caesar cipher;
    computes the power of a number without the operator; computes the square root with Newton's method;
    prints a multiplication table; prints a triangle of stars; simulates rolling two dice; plays rock paper scissors;
    counts down a timer; logs messages with a timestamp; caches the results of a function; retries a failing call;
    measures how long a function takes; converts seconds to hours, minutes and seconds; formats a phone number;
    extracts numbers from a text; replaces all spaces with underscores; computes the area of a circle;
    computes the distance of two points; checks whether three sides make a triangle; solves a quadratic equation;
    returns the nth triangular number; finds the mode of a list; counts the inversions of a list;
    removes all None values from a dictionary; finds the key with the largest value;
    sorts a list of tuples by the second item;
    sorts strings by length; filters even numbers; squares every number; computes the dot product of two vectors;
    normalizes a list to the range 0 to 1; computes the Hamming distance; generates all permutations of a string;
    generates all subsets of a list; finds the maximum subarray sum; computes Pascal's triangle;
    converts a string to snake case; converts snake case to camel case; truncates a text to n characters""".replace(
        "\n", " "
    ).split(";")
)

CODE_TEMPLATES = (
    "Write a Python function that {a}.",
    "Write a Python function that {a}. Include a docstring.",
    "Write a Python program that {a} and show an example of its use.",
    "How do I write a function that {a} in Python?",
    "Write a function that {a} and add unit tests for it.",
    "Show me a short, readable Python implementation that {a}, then explain it step by step.",
    "Write a JavaScript function that {a}.",
    "Write a Python function that {a} and handles invalid input.",
    "Give me two different ways to write a Python function that {a}.",
    "Write a Python class with a method that {a}.",
)

MATH_SETS = (
    ("gsm_symbolic", 10),
    ("chain_sum", 3),
    ("basic_arithmetic", 2),
    ("gcd", 2),
    ("lcm", 2),
    ("prime_factorization", 2),
    ("simple_equations", 3),
    ("polynomial_equations", 2),
    ("fraction_simplification", 1),
    ("products", 1),
    ("leg_counting", 2),
    ("calendar_arithmetic", 2),
    ("time_intervals", 1),
    ("number_sequence", 2),
    ("simple_geometry", 2),
    ("decimal_arithmetic", 1),
    ("power_function", 1),
    ("aiw", 2),
    ("coin_flip", 1),
    ("simple_integration", 1),
    ("count_primes", 1),
    ("number_filtering", 1),
    ("number_sorting", 1),
)

PROSE_OPENINGS = (
    "The lighthouse had been dark for eleven years when the letter came, addressed to a keeper who was long dead.",
    "My grandmother kept every button she ever lost, which is to say that she kept other people's.",
    "It rained on the morning of the auction, and so the only bidders were the ones who had slept in their cars.",
    "Nobody in the valley remembered who had planted the first walnut tree, but everybody knew whose fault it was.",
    "At low tide the old road comes up out of the sea, black and straight, "
    "and for two hours you can walk to the island.",
    "The orchestra had already begun to tune when Marta noticed that the cello beside her had no strings.",
    "There is a kind of silence that belongs only to railway stations after the last train.",
    "The map showed a village where there was only grass, and Tomas was paid to find out which of the two was wrong.",
    "Winter arrived in the city the way a cat enters a room, without a sound and as if it had always been there.",
    "When I was nine my father taught me to repair watches, and I have been late ever since.",
    "The baker opened his shutters at four, and found the square full of sheep.",
    "Of the three sisters, it was the youngest who inherited the ferry, and the eldest who never forgave the river.",
    "Every evening the professor wrote down one thing he no longer believed.",
    "The snow had covered the tracks by noon, but the dog did not care for tracks.",
    "We moved into the house on the hill in October, and by November we had stopped counting its doors.",
    "To understand why the bridge was built crooked, one has to know something about the two mayors.",
    "The desert at night is not empty; it is only that its inhabitants have better manners than we do.",
    "Captain Ferro had crossed the ocean forty times and had never once learned to swim.",
    "She found the violin in the attic, wrapped in a newspaper that reported the end of a war.",
    "A market is a conversation that happens to involve fish.",
    "The clockmaker's apprentice was forbidden three things, and by Thursday she had done two of them.",
    "On the last day of school the caretaker handed back everything that had been confiscated in thirty years.",
    "The wolves came down from the forest in the year the mill burned, and they were very polite.",
    "What I remember best about the hospital is the fish tank, and the one fish that always swam backwards.",
    "Dear Anselm, by the time you read this I shall have sold the piano.",
    "The glacier gave back the climber's rucksack after sixty years, with the sandwiches still inside.",
    "In the library of the monastery there was one shelf that the monks dusted but never read.",
    "Nadia's first act as queen was to ask where the kitchen was.",
    "The river divides the town into people who own umbrellas and people who own boats.",
    "It is a mistake to think that gardens are peaceful.",
    "The detective's trouble was that she believed everybody, one after the other.",
    "Above the tree line the path disappeared, and so did the arguments we had carried up with us.",
)

PROSE_TEMPLATES = (
    "Continue this story:\n\n{a}",
    "Write the next two paragraphs in the same style:\n\n{a}",
)
