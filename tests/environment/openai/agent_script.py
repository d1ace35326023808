"""An agent that is a program. Its first argument says what it does after its first call."""

import json
import os
import sys

from openai import OpenAI

what = sys.argv[1]
task = json.load(sys.stdin)
client = OpenAI()  # base URL and key come from the environment
answer = client.chat.completions.create(
    model=os.environ["OPENAI_MODEL"], messages=[{"role": "user", "content": "hi"}], max_tokens=6
)
text = answer.choices[0].message.content or ""
if what == "fail":
    sys.exit("it went wrong")
if what == "killed":
    os.kill(os.getpid(), 9)
if what == "junk":
    print(json.dumps({"reward": "much"}))
    sys.exit()
if what == "silent":
    sys.exit()
if what == "memory":
    held = bytearray(4 << 30)
if what == "ask-on":
    while True:
        client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "go on"}], max_tokens=6
        )
print("working")
secret = "AWS_SECRET_ACCESS_KEY" in os.environ
print(json.dumps({"reward": 0.5, "info": {"text": text, "seed": task["seed"], "secret": secret}}))
