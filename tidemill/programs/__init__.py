"""Programs: Python functions whose generations share their prefixes in the KV cache and run as one
batch.

from tidemill import gen, program

@program
def answer(s, question):
    s += "Q: " + question + "\nA:" + gen("answer", stop="\n")

print(answer.run("What is a tide mill?", backend="http://127.0.0.1:8000")["answer"])
"""

from tidemill.programs.backend import Backend, Usage
from tidemill.programs.expressions import assistant, gen, select, system, user
from tidemill.programs.local import Local
from tidemill.programs.program import Program, program, set_default_backend
from tidemill.programs.remote import Remote
from tidemill.programs.state import Branches, State, fork, join

__all__ = [
    "Backend", "Branches", "Local", "Program", "Remote", "State", "Usage", "assistant", "fork", "gen", "join", "program",
    "select", "set_default_backend", "system", "user",
]  # fmt: skip
