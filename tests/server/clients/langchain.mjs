// LangChain's JavaScript client, run by test_client_programs: node langchain.mjs URL/v1
import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";

const configuration = { baseURL: process.argv[2] };
const model = new ChatOpenAI({ model: "scripted", apiKey: "none", maxRetries: 0, configuration });
const found = { chat: (await model.invoke("hi")).content, stream: "" };
for await (const chunk of await model.stream("hi")) found.stream += chunk.content;
const weather = tool(({ city }) => `sunny in ${city}`, {
  name: "weather",
  description: "The weather in a city",
  schema: z.object({ city: z.string() }),
});
const bound = model.bindTools([weather]);
const asked = [{ role: "user", content: "Please @weather" }];
const answer = await bound.invoke(asked);
const results = await Promise.all(answer.tool_calls.map((call) => weather.invoke(call)));
found.results = results.map((result) => result.content);
found.after = (await bound.invoke([...asked, answer, ...results])).content;
console.log(JSON.stringify(found));
