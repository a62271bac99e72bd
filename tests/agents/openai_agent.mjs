// What an agent does through OpenAI's package for Node.js, unmodified. Prints one JSON object.
//
//   node openai_agent.mjs PART    with OPENAI_BASE_URL, OPENAI_API_KEY and HEADRACE_NODE_AGENTS
//
// Package and agent live in different folders, so the package is looked up from its own.

import { createRequire } from "node:module";
import path from "node:path";

const require = createRequire(path.join(process.env.HEADRACE_NODE_AGENTS, "package.json"));
const { OpenAI } = require("openai");

const client = new OpenAI({ maxRetries: 0 });
const model = "tiny";
const question = { role: "user", content: "how many lines?" };
const parameters = {
  type: "object",
  properties: { command: { type: "string" } },
  required: ["command"],
};
const description = "Run a command.";
const ran = [];

function bash({ command }) {
  ran.push(command);
  return `output of ${command}`;
}

// Four turns of one conversation: whole, streamed, two calls at once, and their results sent back.
async function chat() {
  const tools = [{ type: "function", function: { name: "bash", description, parameters } }];
  const messages = [question];

  const whole = await client.chat.completions.create({ model, messages, tools });
  messages.push(whole.choices[0].message, { role: "user", content: "and now?" });

  let text = "";
  let usage = null;
  let finish = null;
  const stream = await client.chat.completions.create({
    model,
    messages,
    tools,
    stream: true,
    stream_options: { include_usage: true },
  });
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? "";
    finish = chunk.choices[0]?.finish_reason ?? finish;
    usage = chunk.usage ?? usage;
  }
  messages.push({ role: "assistant", content: text }, { role: "user", content: "look again" });

  const assembled = client.chat.completions.stream({ model, messages, tools });
  const called = (await assembled.finalChatCompletion()).choices[0].message;
  messages.push(called);
  for (const call of called.tool_calls) {
    const content = bash(JSON.parse(call.function.arguments));
    messages.push({ role: "tool", tool_call_id: call.id, content });
  }
  const last = await client.chat.completions.create({ model, messages, tools });
  return {
    whole: whole.choices[0].message.content,
    text,
    finish,
    usage,
    calls: called.tool_calls.map((call) => call.function.name),
    last: last.choices[0].message.content,
  };
}

// The loop that the package itself brings for tools.
async function runner() {
  const runner = client.chat.completions.runTools({
    model,
    messages: [question],
    tools: [
      {
        type: "function",
        function: { name: "bash", description, parameters, parse: JSON.parse, function: bash },
      },
    ],
  });
  const said = await runner.finalContent();
  return { said, usage: await runner.totalUsage(), roles: runner.messages.map((m) => m.role) };
}

// Items out, items back in; then the same by naming the earlier response.
async function responses() {
  const tools = [{ type: "function", name: "bash", description, parameters, strict: false }];
  const input = [question];

  const first = await client.responses.create({ model, input, tools });
  input.push(...first.output);
  for (const item of first.output.filter((item) => item.type === "function_call")) {
    const output = bash(JSON.parse(item.arguments));
    input.push({ type: "function_call_output", call_id: item.call_id, output });
  }

  const types = [];
  const stream = client.responses.stream({ model, input, tools });
  for await (const event of stream) types.push(event.type);
  const second = await stream.finalResponse();

  const third = await client.responses.create({
    model,
    tools,
    previous_response_id: second.id,
    input: "and now?",
  });
  return {
    calls: first.output.filter((item) => item.type === "function_call").length,
    types: [...new Set(types)],
    second: second.output_text,
    third: third.output_text,
    status: third.status,
    usage: third.usage,
  };
}

async function completions() {
  const prompt = "count the files";
  const whole = await client.completions.create({ model, prompt, max_tokens: 50, logprobs: 1 });
  let text = "";
  const stream = await client.completions.create({ model, prompt, max_tokens: 50, stream: true });
  for await (const chunk of stream) text += chunk.choices[0]?.text ?? "";
  return {
    whole: whole.choices[0].text,
    finish: whole.choices[0].finish_reason,
    tokens: whole.choices[0].logprobs.tokens.length,
    text,
  };
}

async function refusal(work) {
  try {
    await work();
  } catch (error) {
    const { name } = error.constructor;
    return { name, status: error.status, code: error.code, param: error.param };
  }
  return null;
}

async function errors() {
  const body = { model, messages: [question] };
  const stranger = new OpenAI({ apiKey: "sk-wrong", maxRetries: 0 });
  return {
    key: await refusal(() => stranger.chat.completions.create(body)),
    schema: await refusal(() =>
      client.chat.completions.create({
        ...body,
        response_format: { type: "json_schema", json_schema: { name: "x", schema: {} } },
      }),
    ),
    role: await refusal(() =>
      client.chat.completions.create({ model, messages: [{ role: "robot", content: "?" }] }),
    ),
    streamed: await refusal(() =>
      client.chat.completions.create({ ...body, temperature: 9, stream: true }),
    ),
    response: await refusal(() => client.responses.create({ model, input: "?", background: true })),
    models: (await client.models.list()).data.map((entry) => entry.id),
  };
}

const parts = { chat, runner, responses, completions, errors };
console.log(JSON.stringify({ ...(await parts[process.argv[2]]()), ran }));
