// llama.cpp on the prompts that `python -m benchmarks.answers --prompts FILE` wrote: first token, decoding, whole answer.
//
//   npm install --ignore-scripts node-llama-cpp@3.22.1
//   node llama_cpp.mjs MODEL.gguf FILE THREADS TOKENS [own-cache]
//
// MODEL may be in one of the forms that `python -m benchmarks.llama_cpp_forms` writes: Q8_0, Q4_0 and BF16 have fast kernels.
// With `own-cache` it has asked the earlier prompt that begins with the same passage, and keeps its KV, as its server does;
// without, everything is computed.
// Its prebuilt llama.cpp has a library for each kind of processor and loads the best one. To measure another one, delete
// those that are better from node_modules/@node-llama-cpp/linux-x64/bins/linux-x64 (libggml-cpu-haswell.so is AVX2).
import fs from "fs";
import {getLlama, LlamaLogLevel} from "node-llama-cpp";

const [file, promptFile, threads, tokens, cache] = process.argv.slice(2);
const llama = await getLlama({gpu: false, build: "never", logLevel: LlamaLogLevel.error, maxThreads: +threads});
const model = await llama.loadModel({modelPath: file});
const context = await model.createContext({contextSize: 4096, threads: +threads, batchSize: 512});
const sequence = context.getSequence();
const median = (values) => values.sort((a, b) => a - b)[values.length >> 1];

async function answer(ids, most) {
  let first = 0, count = 0;
  for await (const _ of sequence.evaluate(ids, {temperature: 0, yieldEogToken: true})) {
    first ||= performance.now();
    if (++count >= most) break;
  }
  return {first, count};
}

const rows = [];
for (const {before, prompt} of JSON.parse(fs.readFileSync(promptFile, "utf8"))) {
  await sequence.clearHistory();
  const ids = model.tokenize(prompt, true);
  if (cache) await answer(model.tokenize(before, true), 1);
  const began = performance.now();
  if (cache) await sequence.adaptStateToTokens(ids.slice(0, -1));
  const kept = sequence.nextTokenIndex;
  const {first, count} = await answer(ids.slice(kept), +tokens);
  rows.push({prompt: ids.length, kept, count, first_s: (first - began) / 1e3, token_s: (performance.now() - first) / (count - 1) / 1e3});
}
const [first, token] = ["first_s", "token_s"].map((name) => median(rows.map((row) => row[name])));
console.log(JSON.stringify({file, threads, cache: Boolean(cache), system: llama.systemInfo, rows}));
console.log(`first token ${first.toFixed(2)} s, ${(1e3 * token).toFixed(1)} ms/token, ${tokens} tokens ${(first + (tokens - 1) * token).toFixed(1)} s`);
process.exit(0);
