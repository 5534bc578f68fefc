// Ollama's own JavaScript client, run by test_client_programs: node ollama.mjs URL
import { Ollama } from "ollama";

const client = new Ollama({ host: process.argv[2] });
const messages = [{ role: "user", content: "hi" }];
const found = { chat: (await client.chat({ model: "scripted", messages })).message.content, stream: "" };
for await (const part of await client.chat({ model: "scripted", messages, stream: true })) found.stream += part.message.content;
found.generate = (await client.generate({ model: "scripted", prompt: "hi" })).response;
found.models = (await client.list()).models.map((model) => model.name);
console.log(JSON.stringify(found));
