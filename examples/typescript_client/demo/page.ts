// A page that works as a device while it is open. The user types the token; it is not in the page.
import { inOneTab, IndexedDbStorage } from "../adapters/browser/index.js";
import { EdgeClient } from "../src/index.js";

const value = (id: string): string => (document.getElementById(id) as HTMLInputElement).value;
const log = document.getElementById("log")!;
const say = (text: string): void => log.append(text, document.createElement("br"));

document.getElementById("start")!.onclick = async () => {
  const response = await fetch("rows.json");
  const client = new EdgeClient({
    server: value("server"),
    ...(value("token") && { token: value("token") }),
    data: await response.json(),
    storage: new IndexedDbStorage(),
    onEvent: (event) => say(event.kind),
  });
  try {
    await inOneTab(() => client.run());
  } catch (error) {
    say(String(error));
  }
};
