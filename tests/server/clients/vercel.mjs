// Vercel's AI SDK with its OpenAI provider: two turns, and a stream with a tool. Prints one JSON object.
import { generateText, stepCountIs, streamText, tool } from 'ai';
import { createOpenAI } from '@ai-sdk/openai';
import { z } from 'zod';

const openai = createOpenAI({ baseURL: process.argv[2], apiKey: 'none' });
const model = openai('scripted');
const messages = [{ role: 'user', content: 'hi' }];
const first = await generateText({ model, messages, maxRetries: 0 });
messages.push(...first.response.messages, { role: 'user', content: 'and again?' });
const second = await generateText({ model, messages, maxRetries: 0 });
const weather = tool({
  description: 'The weather',
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `sunny in ${city}`,
});
const third = streamText({
  model, tools: { weather }, messages: [{ role: 'user', content: '@weather' }], stopWhen: stepCountIs(3), maxRetries: 0,
});
let text = '';
for await (const piece of third.textStream) text += piece;
const steps = await third.steps;
const results = steps.flatMap((step) => step.toolResults.map((result) => result.output));
console.log(JSON.stringify({ first: first.text, second: second.text, third: text, results }));
