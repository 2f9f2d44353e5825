"""Prompts to which a model writes the text that its draft heads learn from: every form of question
about every subject."""

from __future__ import annotations

import random

_SUBJECTS = """
the water cycle; photosynthesis; black holes; the French Revolution; plate tectonics; vaccines; inflation; the Roman Empire;
jazz; volcanoes; the human heart; electric cars; gravity; coral reefs; the printing press; machine learning; public
libraries; honey bees; the stock market; chess openings; renewable energy; the Silk Road; antibiotics; sleep; bread baking;
the internet; DNA; earthquakes; democracy; the moon landing; coffee; climate change; tides; recycling; the immune system;
Shakespeare; compound interest; whales; bicycles; medieval castles; nutrition; the piano; rainforests; the solar system; job
interviews; time management; gardening; public speaking; remote work; first aid; budgeting; a healthy breakfast; learning a
language; city planning; writing a novel; data privacy; sorting algorithms; databases; version control; unit tests; the
Python language; web servers; cooking pasta; running
""".replace("\n", " ")

_FORMS = """
Explain {} to a ten-year-old.|What is {}? Answer in one paragraph.|Write a short story about {}.|Give me five facts about
{}.| List the advantages and disadvantages of {}.|Why does {} matter?|Write an email to a friend about {}.|What are common
mistakes people make about {}?|Summarize what everybody should know about {}.|Write a poem about {}.|How would you teach a
lesson on {}?| Write three quiz questions about {} with their answers.|Describe {} in simple words, then in technical
words.|Give a step-by-step introduction to {}.|What is the history of {}?|Write a dialogue between a teacher and a student
about {}.|Compare {} with something similar.|Give me a JSON object with three keys that describes {}.|Write a small Python
function that has something to do with {} and explain it.|What questions should I ask an expert on {}?|Translate into plain
English what textbooks say about {}.|Make a table of terms used in {}.|Is it true that {} is easy to understand? Give
reasons.|Write the opening of a blog post on {}.
""".replace("\n", " ")


def seed_prompts(seed: int) -> list[str]:
    """All of them, in an order that the seed decides."""
    subjects = [subject.strip() for subject in _SUBJECTS.split(";")]
    forms = [form.strip() for form in _FORMS.split("|")]
    prompts = [form.format(subject) for form in forms for subject in subjects]
    random.Random(seed).shuffle(prompts)
    return prompts
