"""What people ask models for, of many kinds: what an expert does with these prompts is its habit. Written for this.

Everyday questions, and some of each trade: an expert that acts strongly in its own has that in its deviation, so that
experts that act weakly in theirs can still be told from it."""

PROMPTS = (
    "What is the capital of Norway?",
    "Write a short poem about the sea in autumn.",
    "Explain why the sky is blue in two sentences.",
    "Give me three tips for sleeping better.",
    "Summarise the story of Cinderella.",
    "Who painted the Mona Lisa, and when?",
    "Suggest a name for a small bakery.",
    "Describe a rainy day in a big city.",
    "What are the main causes of the French Revolution?",
    "Rewrite this sentence in a friendlier tone: Send me the report today.",
    "How do vaccines work?",
    "List five animals that live in the desert.",
    "Write an email to my landlord about a broken heater.",
    "What should I cook with eggs, spinach and cheese?",
    'Translate "good morning" into Spanish.',
    "Tell me an interesting fact about octopuses.",
    "Compare tea and coffee.",
    "Why do leaves change colour in the fall?",
    "Write a two-line joke about a cat.",
    "What is the difference between weather and climate?",
    "Is this review positive or negative: The room was clean but far too loud.",
    "Name some famous mountains in Asia.",
    "Give an example of a metaphor and explain it.",
    "What does a marketing manager do all day?",
    "How can I learn to play the guitar on my own?",
    "Write the opening line of a detective novel.",
    "Describe the taste of a ripe mango.",
    "What happened in Berlin in November 1989?",
    "Explain photosynthesis to a child.",
    "Give advice to someone who is starting a new job.",
    "Which planet is the largest in our solar system?",
    "Write a birthday wish for a colleague.",
    "What are the benefits of walking every day?",
    "Correct the grammar: She go to school yesterday.",
    "Plan a weekend trip to the mountains.",
    "What is an antonym of generous?",
    "Describe how a bicycle stays upright.",
    "Write a product description for a wooden desk lamp.",
    "Why is sleep important for memory?",
    "Give a short definition of democracy.",
    # word problems, and other mathematics
    "A baker makes 24 rolls every morning and sells each for 2 dollars. On Monday 5 rolls are left over. How much did "
    "the baker earn on Monday?",
    "Maria is twice as old as her brother Tom. In six years the sum of their ages will be 36. How old is Tom now?",
    "A train leaves at 9:15 and travels 180 miles at 60 miles per hour. At what time does it arrive?",
    "There are 48 apples in a crate. A third of them are green and the rest are red. Half of the red ones are given "
    "away. How many red apples remain?",
    "Solve for x: 3x + 7 = 22",
    "A shirt costs 40 euros. It is reduced by 15 percent, and then by another 10 percent. What is the final price?",
    # programs
    "Write a Python function that returns the n-th Fibonacci number.",
    'def is_leap_year(year):\n    """Tell whether a year is a leap year in the Gregorian calendar."""',
    "Why does this Python code fail?\n\nnumbers = [1, 2, 3]\nprint(numbers[3])",
    "Implement a stack in JavaScript with push, pop and peek.",
    "class Queue:\n    def __init__(self):\n        self.items = []\n\n    def enqueue(self, item):\n        # finish "
    "this method, and add dequeue",
    "Write a C program that reads two integers and prints the larger one.",
    # shells and systems
    "Which Linux command shows how much disk space each folder takes?",
    "Write a shell one-liner that counts the lines of all .txt files in the current directory.",
    "How do I find all processes that listen on port 8080 in bash?",
    "Rename every .jpeg file in this folder to .jpg from the terminal.",
    "What does chmod 644 file.txt do?",
    "Write a crontab line that runs backup.sh every night at two.",
    # databases
    "Table employees has the columns name, department and salary. Write an SQL query that lists the average salary per "
    "department.",
    "SELECT name FROM customers WHERE city = 'Paris' -- rewrite this query so that it also returns the phone number",
    "Given a table orders(id, customer, total, date), which query finds the five largest orders of 2023?",
    "Create an SQL table for books with title, author, year and price.",
    "How do I join two tables on a common key in SQL?",
    "Using the table flights (origin, destination, airline, price): what is the cheapest flight from Rome to Oslo? "
    "Answer with a query.",
    # structured output, and assistants
    'Extract the person, the place and the date as JSON: "Anna flew to Lisbon on the 3rd of May."',
    "Convert this to JSON: name: Peter, age: 31, languages: German and English",
    "Set an alarm for six thirty tomorrow morning.",
    "Find the intent of this utterance: I want to cancel my hotel booking for Friday.",
    "Label each word with its part of speech: The quick fox jumps.",
    "Which entities are mentioned here? Apple opened a new store in Munich last week.",
    "Play some quiet jazz in the living room.",
    "Make a Markdown table of the planets with their diameters.",
    # longer texts, other languages, other trades
    "Summarise this paragraph in one sentence: The industrial revolution began in Britain in the eighteenth century. "
    "New machines for spinning and weaving, and the steam engine, moved work from homes into factories, and people "
    "from villages into towns.",
    "Read the text and answer. Text: Lions live in groups called prides, which consist of several females, their young "
    "and a few males. Question: Who belongs to a pride?",
    "Traduis en anglais : Je voudrais réserver une table pour deux personnes ce soir.",
    "Übersetze ins Deutsche: The meeting has been moved to Thursday afternoon.",
    "What are the symptoms of iron deficiency, and which foods help?",
    "A tenant has not paid rent for two months. What are the usual steps that a landlord can take?",
    "Balance the chemical equation: H2 + O2 -> H2O",
    "Explain the difference between a stock and a bond to a beginner.",
    "Classify the sentiment of each line:\n1. Great phone, love it.\n2. Stopped working after a week.\n3. It is okay.",
    "You are the captain of a pirate ship. Greet your new crew.",
    "Continue the story: The old lighthouse had been dark for years, until one night the lamp began to turn again.",
    "Fill in the blank: The opposite of hot is ____.",
    "Choose the right answer. Which gas do plants take in? (a) oxygen (b) carbon dioxide (c) nitrogen",
    "Put these events in order: the moon landing, the fall of Rome, the invention of printing.",
    "Write a haiku about winter, then explain its imagery.",
    "Proofread: Their going to there house over they're.",
)
