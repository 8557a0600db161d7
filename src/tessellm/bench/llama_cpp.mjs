// llama.cpp by node-llama-cpp, for `tessellm bench --against llama.cpp`: a line {"prompts": [[ids]], "new": n} in, a line
// {"first": seconds to the first token of all prompts, "step": seconds a step after it} out.
import {createInterface} from "node:readline";
import {pathToFileURL} from "node:url";

const [library, modelPath, threads] = process.argv.slice(2);
const {getLlama} = await import(pathToFileURL(library).href);
const llama = await getLlama({gpu: false, build: "never", logLevel: "error", maxThreads: Number(threads)});
const model = await llama.loadModel({modelPath});
let context = null, sequences = [], room = 0;

async function makeRoom(count, length) {
    if (sequences.length === count && room >= length)
        return;
    await context?.dispose();
    context = await model.createContext({sequences: count, contextSize: length});
    sequences = Array.from({length: count}, () => context.getSequence());
    room = length;
}

async function write(sequence, prompt, count, came) {
    await sequence.clearHistory();
    let written = 0;
    for await (const _ of sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
        written += 1;
        came(written, performance.now());
        if (written === count)
            break;
    }
}

for await (const line of createInterface({input: process.stdin})) {
    const {prompts, new: count} = JSON.parse(line);
    await makeRoom(prompts.length, Math.max(...prompts.map((prompt) => prompt.length)) + count);
    const start = performance.now();
    let first = start, end = start;
    const came = (written, now) => {
        end = now;
        first = written === 1 ? now : first;
    };
    await Promise.all(prompts.map((prompt, row) => write(sequences[row], prompt, count, came)));
    console.log(JSON.stringify({first: (first - start) / 1e3, step: (end - first) / 1e3 / (count - 1)}));
}
process.exit(0);
