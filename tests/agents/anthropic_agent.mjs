// What an agent does through Anthropic's package for Node.js, unmodified. Prints one JSON object.
//
//   node anthropic_agent.mjs PART    with ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and
//                                    HEADRACE_NODE_AGENTS

import { createRequire } from "node:module";
import path from "node:path";

const require = createRequire(path.join(process.env.HEADRACE_NODE_AGENTS, "package.json"));
const { Anthropic } = require("@anthropic-ai/sdk");

const client = new Anthropic({ maxRetries: 0 });
const model = "tiny";
const ran = [];
const system = [{ type: "text", text: "Use bash.", cache_control: { type: "ephemeral" } }];
const tools = [
  {
    name: "bash",
    description: "Run a command.",
    input_schema: { type: "object", properties: { command: { type: "string" } } },
  },
];

// A loop as agents write it: every answer is streamed and goes back whole, until no tool is used.
async function loop() {
  const body = { model, max_tokens: 200, system, tools };
  const messages = [{ role: "user", content: "how many lines?" }];
  const counted = await client.messages.countTokens({ model, system, tools, messages });
  const types = new Set();
  let usage = null;
  let message;
  do {
    const stream = client.messages.stream({ ...body, messages });
    stream.on("streamEvent", (event) => types.add(event.type));
    message = await stream.finalMessage();
    usage ??= message.usage;
    messages.push({ role: "assistant", content: message.content });
    const used = message.content.filter((block) => block.type === "tool_use");
    if (used.length === 0) break;
    const results = used.map((block) => {
      ran.push(block.input.command);
      const content = [{ type: "text", text: `output of ${block.input.command}` }];
      return { type: "tool_result", tool_use_id: block.id, content };
    });
    messages.push({ role: "user", content: results });
  } while (messages.length < 20);
  return {
    kinds: messages.filter((m) => m.role === "assistant").map((m) => m.content.map((b) => b.type)),
    said: message.content.at(-1).text,
    stop: message.stop_reason,
    counted: counted.input_tokens === usage.input_tokens,
    types: [...types],
  };
}

async function errors() {
  const body = { model, max_tokens: 20, messages: [{ role: "user", content: "?" }] };
  const stranger = new Anthropic({ apiKey: "sk-wrong", maxRetries: 0 });
  const refusal = async (work) => {
    try {
      await work();
    } catch (error) {
      const { name } = error.constructor;
      return { name, status: error.status, type: error.error.error.type };
    }
    return null;
  };
  return {
    key: await refusal(() => stranger.messages.create(body)),
    budget: await refusal(() => client.messages.create({ ...body, max_tokens: -1 })),
  };
}

const parts = { loop, errors };
console.log(JSON.stringify({ ...(await parts[process.argv[2]]()), ran }));
