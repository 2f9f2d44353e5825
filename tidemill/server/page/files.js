// Text files that go with a message. They are sent as a part of its text, so that any model can read them.

import { $, h, icon, toast } from "./dom.js";
import { highlight } from "./code.js";

const MAX_BYTES = 256 * 1024; // a file; about as much as the longest contexts hold
const MAX_TOTAL = 512 * 1024;
const MAX_FILES = 10;

let attached = [];

export function setUp() {
  $("attach").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", async () => {
    await attach([...$("file").files]);
    $("file").value = ""; // so that the same file can be chosen again
    $("text").focus();
  });
  $("text").addEventListener("paste", (event) => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    attach([...event.clipboardData.files]);
  });
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
  addEventListener("dragover", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    document.body.classList.add("dropping");
  });
  addEventListener("dragleave", (event) => event.relatedTarget === null && document.body.classList.remove("dropping"));
  addEventListener("drop", (event) => {
    document.body.classList.remove("dropping");
    if (!hasFiles(event)) return;
    event.preventDefault();
    attach([...event.dataTransfer.files]);
  });
}

export const hasAttached = () => attached.length > 0;

/** What is attached goes with the message that is sent now. */
export function takeAttached() {
  const taken = attached;
  attached = [];
  draw();
  return taken;
}

async function attach(files) {
  const complaints = [];
  for (const file of files) {
    try {
      attached.push(await read(file));
    } catch (error) {
      complaints.push(error.message);
    }
  }
  draw();
  if (complaints.length) toast(complaints.join(" "));
}

async function read(file) {
  if (attached.length >= MAX_FILES) throw new Error(`${file.name}: at most ${MAX_FILES} files can be attached.`);
  const total = attached.reduce((sum, { text }) => sum + text.length, file.size);
  if (file.size > MAX_BYTES || total > MAX_TOTAL) {
    throw new Error(`${file.name} is too large (${sizeOf(file.size)}). At most ${sizeOf(MAX_BYTES)} a file and ${sizeOf(MAX_TOTAL)} together.`);
  }
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name} is not a text file.`);
  }
  if (text.includes("\0")) throw new Error(`${file.name} is not a text file.`);
  return { name: file.name.slice(0, 120), text: text.replaceAll("\r\n", "\n") };
}

function draw() {
  $("attached").hidden = !attached.length;
  $("attached").replaceChildren(...attached.map((file) => h("li", { class: "chip" }, label(file), remover(file))));
}

function remover(file) {
  const onclick = () => {
    attached = attached.filter((one) => one !== file);
    draw();
    $("text").focus();
  };
  return h("button", { type: "button", class: "icon", "aria-label": `Remove ${file.name}`, onclick }, icon("close"));
}

const label = ({ name, text }) => [h("b", {}, name), h("small", {}, sizeOf(new Blob([text]).size))];
const sizeOf = (bytes) => (bytes < 1024 ? `${bytes} B` : `${Math.round(bytes / 1024)} kB`);
const languageOf = (name) => /\.([\w+#-]{1,12})$/.exec(name)?.[1].toLowerCase() ?? "";

/** The files of a sent message: chips that open. */
export function fileViews(message) {
  return (message.files ?? []).map((file) => {
    const code = h("pre", { tabIndex: 0 }, h("code", {}, highlight(file.text, languageOf(file.name))));
    return h("details", { class: "file" }, h("summary", { class: "chip" }, label(file)), code);
  });
}

/** A message as it is sent: files first, each between fences longer than any of its own. */
export function wholeText({ content, files }) {
  const blocks = (files ?? []).map(({ name, text }) => {
    const longest = (text.match(/`+/g) ?? []).reduce((most, run) => Math.max(most, run.length), 2);
    const fence = "`".repeat(longest + 1);
    return `File \`${name}\`:\n\n${fence}${languageOf(name)}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...blocks, content].filter(Boolean).join("\n\n");
}
