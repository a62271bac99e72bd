// An agent in Vercel's AI SDK, unmodified: the SDK's own loop over one tool. Prints one JSON object.
//
//   node ai_sdk_agent.mjs API HOW    with API chat, responses or messages, HOW whole or streamed;
//                                    OPENAI_*, ANTHROPIC_* and HEADRACE_NODE_AGENTS

import { createRequire } from "node:module";
import path from "node:path";

const require = createRequire(path.join(process.env.HEADRACE_NODE_AGENTS, "package.json"));
const { generateText, jsonSchema, stepCountIs, streamText, tool } = require("ai");
const { createOpenAI } = require("@ai-sdk/openai");
const { createAnthropic } = require("@ai-sdk/anthropic");

globalThis.AI_SDK_LOG_WARNINGS = false;
const [api, how] = process.argv.slice(2);
const models = {
  chat: () => createOpenAI().chat("tiny"),
  responses: () => createOpenAI()("tiny"),
  messages: () => createAnthropic({ baseURL: `${process.env.ANTHROPIC_BASE_URL}/v1` })("tiny"),
};
const ran = [];
const errors = [];
const bash = tool({
  description: "Run a command.",
  inputSchema: jsonSchema({ type: "object", properties: { command: { type: "string" } } }),
  execute: async ({ command }) => {
    ran.push(command);
    return `output of ${command}`;
  },
});
const work = {
  model: models[api](),
  tools: { bash },
  stopWhen: stepCountIs(5),
  prompt: "how many lines?",
};
const onError = ({ error }) => errors.push(String(error));
const result = how === "streamed" ? streamText({ ...work, onError }) : await generateText(work);
console.log(JSON.stringify({ text: await result.text, ran, errors }));
